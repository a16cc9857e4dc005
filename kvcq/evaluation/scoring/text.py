"""Texts compared: exact, contains, and the share of needles found."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from kvcq.evaluation.needle import found
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
    haystack = normalise(final_text(text))
    wanted = [re.escape(normalise(answer)) for answer in answers]
    return Verdict(float(any(re.search(rf"(?<!\w){each}(?!\w)", haystack) for each in wanted)), bool(haystack))


def needles(text: str, answers: Sequence[str]) -> Verdict:
    """Score the share of the answers that stand anywhere in the text, upper and lower case alike, as RULER does."""
    final = final_text(text)
    return Verdict(found(final, answers) / len(answers), bool(final.strip()))
