"""What needles are hidden in: sentences that repeat for as long as a context needs, and words for the needles' keys."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from kvcq.errors import InputError

NOISE = "builtin:noise"
_PARAGRAPH = re.compile(r"\n\s*\n")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class Haystack:
    """Sentences of a text.

    Attributes:
        label: What the text is called in the report; no machine path.
        sha256: Of the sentences, one a line, UTF-8.
        sentences: At least one; white space within is single spaces.
        joint: What stands between two sentences in a prompt.
    """

    label: str
    sha256: str
    sentences: tuple[str, ...]
    joint: str = " "


def text_haystack(label: str, text: str) -> Haystack:
    """Cut a text at its sentence ends and paragraphs.

    Raises:
        InputError: no sentence in it.
    """
    parts = [part for paragraph in _PARAGRAPH.split(text) for part in _SENTENCE.split(paragraph)]
    sentences = tuple(line for part in parts if (line := " ".join(part.split())))
    if not sentences:
        raise InputError("no text in it", where=label, fix="name a text with sentences")
    return Haystack(label, hashlib.sha256("\n".join(sentences).encode()).hexdigest(), sentences)


@cache
def noise_haystack() -> Haystack:
    """Return the packaged sentences: plain statements that have nothing to do with any question."""
    return text_haystack(NOISE, _parts("needle_noise.txt")[1])


@cache
def refrain_haystack() -> Haystack:
    """Return the five short sentences that one subtask repeats, one a line."""
    short = text_haystack("builtin:refrain", _parts("needle_noise.txt")[0])
    return Haystack(short.label, short.sha256, short.sentences, "\n")


@cache
def key_words() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the adjectives and nouns that keys are made of; no word occurs twice."""
    adjectives, nouns = _parts("needle_words.txt")
    return tuple(adjectives.split()), tuple(nouns.split())


def _parts(name: str) -> list[str]:
    return files("kvcq.evaluation").joinpath(name).read_text(encoding="ascii").split("%%")
