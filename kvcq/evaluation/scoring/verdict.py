"""What judging one answer gives."""

from __future__ import annotations

import re
from dataclasses import dataclass

_THOUGHTS = re.compile(r"<(think|thinking|reasoning)>.*?</\1>", re.DOTALL)
_OPEN_END = re.compile(r"^.*?</(?:think|thinking|reasoning)>", re.DOTALL)
_OPEN_START = re.compile(r"<(?:think|thinking|reasoning)>.*$", re.DOTALL)


@dataclass(frozen=True)
class Verdict:
    """A score between 0 and 1, and whether an answer could be read out of the text at all.

    `note` says in a few words why the score is not 1, where that is known.
    """

    score: float
    found: bool = True
    note: str = ""


def final_text(text: str) -> str:
    """Return an answer without the reasoning before it.

    ``<think>...</think>`` goes. An end tag without its start tag (the template wrote that) ends the reasoning; a start
    tag without an end leaves nothing after it, because the budget ended within the reasoning.
    """
    text = _THOUGHTS.sub("", text)
    text = _OPEN_END.sub("", text)
    return _OPEN_START.sub("", text)
