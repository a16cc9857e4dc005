"""Questions of a task file: one JSON object a line, each with a prompt, what is right, and how that is judged.

::

    {"prompt": "What is 6 x 7? Answer with the number.", "answers": ["42"], "metric": "exact"}

`messages` replaces `prompt` for a conversation of its own. Fields: `id` (the line number if absent), `answers` (any of
them is right; for `needles`, all), `choices` (the options, for `choice`), `tests` and `entry_point` (for `code`),
`meta` (ignored).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from kvcq.errors import SHOWN, InputError, shown
from kvcq.spec.base import SpecModel

Metric = Literal["exact", "contains", "needles", "choice", "math", "code"]
MAX_CHOICES = 26


class Message(SpecModel):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "developer"]
    content: str


class Case(SpecModel):
    """One run of a program: what it reads from stdin, and what it must print."""

    input: str
    output: str


class Row(SpecModel):
    """One line of a task file; see the module."""

    id: str | int | None = None
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    answers: tuple[str, ...] = ()
    metric: Metric
    choices: tuple[str, ...] = Field(default=(), max_length=MAX_CHOICES)
    tests: str | tuple[Case, ...] = ""
    entry_point: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_.]*$")
    meta: Any = None

    @field_validator("answers", mode="before")
    @classmethod
    def _numbers_as_text(cls, value: Any) -> Any:
        if isinstance(value, list):
            return [str(v) if isinstance(v, int | float) and not isinstance(v, bool) else v for v in value]
        return value

    @model_validator(mode="after")
    def _complete(self) -> Row:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("needs exactly one of prompt and messages")
        if self.messages is not None and (not self.messages or self.messages[-1].role == "assistant"):
            raise ValueError("messages must end with the user's turn")
        if self.metric == "code":
            if not self.tests:
                raise ValueError("metric code needs tests")
            if self.answers or self.choices:
                raise ValueError("metric code takes tests, no answers or choices")
        else:
            if not self.answers or not all(answer.strip() for answer in self.answers):
                raise ValueError(f"metric {self.metric} needs answers, none of them empty")
            if self.tests or self.entry_point:
                raise ValueError("tests and entry_point are for metric code")
            if self.choices and self.metric != "choice":
                raise ValueError("choices are for metric choice")
        if self.metric == "choice":
            for answer in self.answers:
                option_letter(answer, self.choices)
        return self


@dataclass(frozen=True)
class Question:
    """One question of a task.

    Attributes:
        task: The task file's name without its ending.
        id: Unique within the task.
        row: Prompt, answers and metric.
        tokens: Token ids to send instead of the row's prompt, for prompts that were made with a tokenizer.
        max_tokens: Most tokens of an answer, if this question has a limit of its own.
    """

    task: str
    id: str
    row: Row
    tokens: tuple[int, ...] | None = None
    max_tokens: int | None = None

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"{self.task}, item {self.id}"


def option_letter(answer: str, choices: Sequence[str]) -> str:
    """Return the letter of an answer that is a letter, or the text of one of the choices.

    Raises:
        ValueError: neither, or a letter beyond the choices.
    """
    texts = [choice.strip() for choice in choices]
    if answer.strip() in texts:
        return chr(ord("A") + texts.index(answer.strip()))
    letter = answer.strip().strip("().").upper()
    last = chr(ord("A") + (len(choices) or MAX_CHOICES) - 1)
    if len(letter) != 1 or not "A" <= letter <= last:
        raise ValueError(f"the answer {shown(answer)} is neither a letter from A to {last} nor one of the choices")
    return letter


def load_questions(paths: Sequence[Path]) -> tuple[Question, ...]:
    """Read task files in order.

    Raises:
        InputError: unreadable, empty, or a line that is not understood; names file and line. Two files of one name, or
            two items of one id.
    """
    found: list[Question] = []
    tasks: set[str] = set()
    for path in paths:
        if path.stem in tasks:
            raise InputError(f"two task files are called {path.stem}", where="--items", fix="rename one of them")
        tasks.add(path.stem)
        found += _load(path)
    return tuple(found)


def _load(path: Path) -> list[Question]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read task file: {error}", where=path, fix="name a UTF-8 .jsonl file") from None
    questions: dict[str, Question] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        row = _row(line, where)
        name = str(number if row.id is None else row.id)
        if name in questions:
            raise InputError(f"a second item with id {shown(name)}", where=where, fix="give each item its own id")
        questions[name] = Question(path.stem, name, row)
    if not questions:
        raise InputError("the task file has no items", where=path, fix="write one JSON object a line")
    return list(questions.values())


def _row(line: str, where: str) -> Row:
    try:
        plain = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}", where=where, fix="write one JSON object a line") from None
    if not isinstance(plain, dict):
        raise InputError("not a JSON object", where=where, fix="write one JSON object a line")
    if unknown := sorted(set(plain) - set(Row.model_fields)):
        fix = f"known: {', '.join(Row.model_fields)}; facts of your own go into meta"
        raise InputError(f"unknown field {shown(unknown[0])}", where=where, fix=fix)
    try:
        return Row.model_validate(plain)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])[:SHOWN]
        message = first["msg"].removeprefix("Value error, ")
        raise InputError(f"{field + ': ' if field else ''}{message}", where=where) from None
