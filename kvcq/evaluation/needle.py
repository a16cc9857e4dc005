"""Needle questions after RULER: facts hidden in a long text, asked for at its end.

The eight subtasks and their wording are RULER's (NVIDIA, Apache License 2.0). What differs is stated here. A question
is a function of (seed, subtask, row, context, depth, haystack, tokenizer) and of nothing else, so neither the number
of questions nor their order matters. Needles stand between sentences. The first needle, which is always asked for,
stands at the wanted depth; further needles at seeded depths. Prompt (chat template and answer prefix included) and
answer together fit in `context` tokens of the model's own tokenizer. All keys of a question are distinct.
"""

from __future__ import annotations

import uuid
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Literal

from kvcq.errors import InputError, shown
from kvcq.evaluation.haystack import Haystack, key_words, refrain_haystack

Encode = Callable[[str, str], Sequence[int]]
"""``(message, answer prefix) -> token ids`` of the whole prompt."""

DEPTHS = (0.0, 25.0, 50.0, 75.0, 100.0)
ITEMS = 20
SEARCH_STEPS = 24


@dataclass(frozen=True)
class Subtask:
    """One kind of question: what is hidden where, and how much of it is asked for.

    `hay` is the repeated refrain, the chosen text, or further needles with other keys. `new_tokens` limits the answer.
    """

    kind: Literal["number", "uuid"]
    hay: Literal["refrain", "text", "needles"]
    keys: int = 1
    values: int = 1
    asked: int = 1
    new_tokens: int = 32


SUBTASKS = {
    "single_1": Subtask("number", "refrain"),
    "single_2": Subtask("number", "text"),
    "single_3": Subtask("uuid", "text", new_tokens=64),
    "multikey_1": Subtask("number", "text", keys=4),
    "multikey_2": Subtask("number", "needles"),
    "multikey_3": Subtask("uuid", "needles", new_tokens=64),
    "multivalue": Subtask("number", "text", values=4, new_tokens=128),
    "multiquery": Subtask("number", "text", keys=4, asked=4, new_tokens=128),
}


@dataclass(frozen=True)
class Question:
    """One item: `tokens` are the whole prompt, `answers` the needles' values that a right answer contains."""

    task: str
    row: int
    context: int
    depth: float
    message: str
    prefix: str
    answers: tuple[str, ...]
    tokens: tuple[int, ...]
    new_tokens: int

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"needle {self.task}, context {self.context}, row {self.row}"


@dataclass(frozen=True)
class _Draft:
    """A question without its haystack: needles with their depths, and the words around the text."""

    intro: str
    needles: tuple[tuple[float, str], ...]
    question: str
    prefix: str
    answers: tuple[str, ...]


def make_question(
    task: str, *, seed: int, row: int, context: int, depth: float, text: Haystack, encode: Encode
) -> Question:
    """Make one question whose prompt is as long as fits.

    Args:
        task: Name of the subtask.
        seed: Of all questions.
        row: Number of the question within its subtask.
        context: Tokens that prompt and answer may take.
        depth: Where the first needle stands, percent of the haystack's characters.
        text: Haystack of the subtasks that hide needles in text.
        encode: The model's tokenizer with its chat template.

    Raises:
        InputError: an unknown subtask, a depth that is no percentage, or a context too short for the question alone.
    """
    kind = SUBTASKS.get(task)
    if kind is None:
        fix = f"known: {', '.join(SUBTASKS)}"
        raise InputError(f"{shown(task)} is no needle subtask", where="--needle-tasks", fix=fix)
    if not 0 <= depth <= 100:
        raise InputError(f"{depth:g} is no percentage", where="--needle-depths", fix="use 0 to 100")
    label = f"{seed}/{task}/{row}"
    keys = _Keys(label)
    draft = _draft(kind, keys.first(kind.keys), _seeded(f"{label}/needles"), depth)
    sentences, joint = _hay(kind, keys, text, label)
    limit = context - kind.new_tokens

    def written(count: int) -> tuple[str, Sequence[int]]:
        message = "\n".join([draft.intro, _bury(sentences.first(count), draft.needles, joint), draft.question])
        return message, encode(message, draft.prefix)

    count = _most(sentences, limit, lambda n: len(written(n)[1]), task, context)
    message, tokens = written(count)
    return Question(task, row, context, depth, message, draft.prefix, draft.answers, tuple(tokens), kind.new_tokens)


def make_questions(
    tasks: Sequence[str],
    contexts: Sequence[int],
    depths: Sequence[float],
    items: int,
    *,
    seed: int,
    text: Haystack,
    encode: Encode,
) -> list[Question]:
    """Make `items` questions of every subtask at every context; depths take turns from row to row."""
    return [
        make_question(
            task, seed=seed, row=row, context=context, depth=depths[row % len(depths)], text=text, encode=encode
        )
        for context in contexts
        for task in tasks
        for row in range(items)
    ]


def found(answer: str, values: Sequence[str]) -> int:
    """Return how many of `values` an answer contains, upper and lower case alike."""
    folded = answer.lower()
    return sum(value.lower() in folded for value in values)


def place(sentences: Sequence[str], depth: float) -> int:
    """Return before which sentence something at `depth` percent stands, n for the end: the nearest sentence end."""
    ends = [0, *accumulate(map(len, sentences))]
    wanted = ends[-1] * depth / 100
    after = bisect_left(ends, wanted)
    if after and wanted - ends[after - 1] <= ends[after] - wanted:
        return after - 1
    return after


class _Sentences:
    """A list as long as wanted: a text that repeats, or distinct needles; `make(i, j)` writes the lines [i, j)."""

    def __init__(self, make: Callable[[int, int], list[str]], most: int | None = None) -> None:
        self._make, self.most = make, most
        self._made: list[str] = []

    def first(self, count: int) -> list[str]:
        """Return the first `count` sentences."""
        if count > len(self._made):
            self._made += self._make(len(self._made), count)
        return self._made[:count]


class _Keys:
    """Keys of one row, distinct, in an order of its own."""

    def __init__(self, label: str) -> None:
        adjectives, nouns = key_words()
        self._words, self._random = (adjectives, nouns), _seeded(f"{label}/keys")
        self._drawn: dict[str, None] = {}
        self.most = len(adjectives) * len(nouns)

    def first(self, count: int) -> list[str]:
        """Return the first `count` keys."""
        while len(self._drawn) < count:
            self._drawn["-".join(map(self._random.choice, self._words))] = None
        return list(self._drawn)[:count]


def _seeded(label: str) -> Random:
    return Random(label)  # noqa: S311 - questions must come back, they hide nothing from an attacker


def _draft(kind: Subtask, keys: Sequence[str], random: Random, depth: float) -> _Draft:
    values: dict[str, None] = {}
    while len(values) < kind.keys * kind.values:
        values[_value(kind, random)] = None
    drawn = list(values)
    pairs = [(keys[i // kind.values], value) for i, value in enumerate(drawn)]
    depths = [depth, *(random.uniform(0, 100) for _ in pairs[1:])]
    asked = keys[: kind.asked]
    answers = tuple(value for key, value in pairs if key in asked)
    subject = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + ", and " + asked[-1]
    plural = len(answers) > 1
    noun = f"{kind.kind}s" if plural else kind.kind
    some, are, which = ("Some", "are", "are all") if plural else ("A", "is", "is")
    return _Draft(
        intro=f"{some} special magic {noun} {are} hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {noun} afterwards.",
        needles=tuple((at, _needle(kind, *pair)) for at, pair in zip(depths, pairs, strict=True)),
        question=f"What {which} the special magic {noun} for {subject} mentioned in the provided text?",
        prefix=f"The special magic {noun} for {subject} mentioned in the provided text {are}",
        answers=answers,
    )


def _needle(kind: Subtask, key: str, value: str) -> str:
    return f"One of the special magic {kind.kind}s for {key} is: {value}."


def _value(kind: Subtask, random: Random) -> str:
    if kind.kind == "uuid":
        return str(uuid.UUID(int=random.getrandbits(128), version=4))
    return str(random.randint(1_000_000, 9_999_999))


def _hay(kind: Subtask, keys: _Keys, text: Haystack, label: str) -> tuple[_Sentences, str]:
    random = _seeded(f"{label}/hay")
    if kind.hay == "needles":
        own = kind.keys

        def needles(start: int, stop: int) -> list[str]:
            return [_needle(kind, key, _value(kind, random)) for key in keys.first(own + stop)[own + start :]]

        return _Sentences(needles, keys.most - own), "\n"
    hay = refrain_haystack() if kind.hay == "refrain" else text
    start = 0 if kind.hay == "refrain" else random.randrange(len(hay.sentences))

    def lines(first: int, stop: int) -> list[str]:
        return [hay.sentences[(start + number) % len(hay.sentences)] for number in range(first, stop)]

    return _Sentences(lines), hay.joint


def _bury(sentences: Sequence[str], needles: Sequence[tuple[float, str]], joint: str) -> str:
    lines: list[list[str]] = [[] for _ in range(len(sentences) + 1)]
    for depth, needle in needles:
        lines[place(sentences, depth)].append(needle)
    parts = [part for line, sentence in zip(lines, [*sentences, None], strict=True) for part in (*line, sentence)]
    return joint.join(part for part in parts if part is not None)


def _most(sentences: _Sentences, limit: int, tokens: Callable[[int], int], task: str, context: int) -> int:
    """Return the largest number of sentences found whose prompt takes at most `limit` tokens.

    Raises:
        InputError: the question alone is longer, or a context that takes more distinct keys than there are.
    """
    low, used = 0, tokens(0)
    if used > limit:
        raise InputError(
            f"{context} tokens are too few for {task}: the question takes {used} and its answer {context - limit}",
            where="--needle-lengths",
            fix="use a longer context",
        )
    empty, high, above = used, None, 0
    guess = 16
    for _ in range(SEARCH_STEPS):
        if high is not None and high - low <= 1:
            break
        if sentences.most is not None and guess > sentences.most:
            raise InputError(f"{context} tokens take more distinct keys than there are", where=f"needle {task}")
        total = tokens(guess)
        if total <= limit:
            low, used = guess, total
        else:
            high, above = guess, total
        if high is None:
            # Tokens a sentence so far; always a step further, and a little past the limit to close the bracket.
            guess = max(low + 1, int(low * (limit - empty) / max(used - empty, 1) * 1.01) + 1)
        else:
            inside = low + round((high - low) * (limit - used) / max(above - used, 1))
            guess = min(max(inside, low + 1), high - 1)
    return low
