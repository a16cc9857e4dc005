"""Texts compared: exact, contains, and the fraction of answers that are contained."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from kvcq.evaluation.scoring.verdict import Verdict, final_text

_EDGES = " .,;:!?'\"`*“”‘’()[]"


def normalise(text: str) -> str:
    """Return NFKC text in lower case (case folded) with single spaces and no punctuation at either end.

    A text of nothing but punctuation keeps it.
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    flat = " ".join(folded.split())
    return flat.strip(_EDGES) or flat


def exact(text: str, answers: Sequence[str]) -> Verdict:
    """Score 1 if the whole answer, normalised, is one of the answers."""
    given = normalise(final_text(text))
    return Verdict(float(given in {normalise(answer) for answer in answers}), bool(given))


def contains(text: str, answers: Sequence[str]) -> Verdict:
    """Score 1 if any of the answers stands in the text as whole words: 7 is not in 17."""
    return Verdict(float(any(_within(text, answers))), bool(final_text(text).strip()))


def fraction(text: str, answers: Sequence[str]) -> Verdict:
    """Score the share of the answers that stand in the text as whole words."""
    return Verdict(sum(_within(text, answers)) / len(answers), bool(final_text(text).strip()))


def _within(text: str, answers: Sequence[str]) -> list[bool]:
    """Return for each answer whether it stands in the text, bounded by other than letters and digits."""
    haystack = normalise(final_text(text))
    needles = [normalise(answer) for answer in answers]
    return [re.search(rf"(?<!\w){re.escape(needle)}(?!\w)", haystack) is not None for needle in needles]
