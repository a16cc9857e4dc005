"""Texts compared: exact, contains, and the share of needles found."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from kvcq.evaluation.needle import found
from kvcq.evaluation.scoring.verdict import Verdict, final_text

_EDGES = " .,;:!?'\"`*“”‘’()[]"

_NUMBER = re.compile(r"[-+−]?\d+(?:[.,]\d+)*")
# A sign counts where nothing stands before it: 3-7 holds 7. A point or comma counts where a digit follows.
_BEFORE_NUMBER = r"(?<!\w)(?<!\d[.,])(?<!(?<!\w)[-−])"
_AFTER_NUMBER = r"(?!\w|[.,]\d)"


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
    """Score 1 if any of the answers stands in the text as whole words, or whole numbers: 7 is not in 17, 7.5 or -7."""
    haystack = normalise(final_text(text))
    return Verdict(float(any(_stands(normalise(answer), haystack) for answer in answers)), bool(haystack))


def _stands(answer: str, text: str) -> bool:
    before, after = (_BEFORE_NUMBER, _AFTER_NUMBER) if _NUMBER.fullmatch(answer) else (r"(?<!\w)", r"(?!\w)")
    return re.search(before + re.escape(answer) + after, text) is not None


def needles(text: str, answers: Sequence[str]) -> Verdict:
    """Score the share of the answers that stand anywhere in the text, upper and lower case alike, as RULER does."""
    final = final_text(text)
    return Verdict(found(final, answers) / len(answers), bool(final.strip()))
