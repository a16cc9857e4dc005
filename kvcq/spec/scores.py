"""``scores.json``: answers of servers to task files, judged. No addresses, paths or times: those go to ``run.json``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from kvcq.spec.base import SpecModel
from kvcq.spec.files import FileEntry, Sha256
from kvcq.spec.tasks import Interval, PairTest


class Sampling(SpecModel):
    """How every prompt is asked.

    Attributes:
        api: ``chat`` (messages) or ``completions`` (raw prompts).
        samples: Answers to each prompt; sample i has seed `seed` + i.
        temperature: 0 is greedy.
        max_tokens: Most tokens of an answer.
        seed: Of the first sample.
        body: Further fields of the request, as given.
    """

    api: Literal["chat", "completions"]
    samples: int = Field(ge=1)
    temperature: float = Field(ge=0)
    max_tokens: int = Field(ge=1)
    seed: int = Field(ge=0)
    body: dict[str, JsonValue] = Field(default_factory=dict)


class TaskFile(SpecModel):
    """What was asked: task name, number of items, SHA-256 over the canonical items in order, items by metric."""

    task: str
    items: int = Field(ge=1)
    sha256: Sha256
    metrics: dict[str, int]


class Answer(SpecModel):
    """One answer as it came.

    Attributes:
        server, task, item: Who answered what.
        sample: Its number among the answers to this prompt.
        text: The answer; what it is judged by.
        truncated: The token limit cut it.
        prompt_tokens, completion_tokens: As counted by the server, None if it does not.
    """

    server: str
    task: str
    item: str
    sample: int = Field(ge=0)
    text: str
    truncated: bool
    prompt_tokens: int | None
    completion_tokens: int | None


class JudgedAnswer(Answer):
    """One line of ``answers.jsonl``.

    Attributes:
        score: Between 0 and 1.
        found: An answer could be read out of the text.
        note: Why the score is not 1, where known.
    """

    score: float = Field(ge=0, le=1)
    found: bool
    note: str


class TaskResult(SpecModel):
    """One server on one task.

    Attributes:
        task: The task.
        score: Mean over items of the mean over samples.
        interval: Of the score, items resampled.
        majority: Share of items that more than half of their samples have right (score 1).
        truncated, not_found, empty: Answers cut by the limit; in which no answer was found; without any text.
        answers: All of them.
        completion_tokens: Mean tokens of an answer, None if the server does not count.
    """

    task: str
    score: float = Field(ge=0, le=1)
    interval: Interval
    majority: float = Field(ge=0, le=1)
    truncated: int = Field(ge=0)
    not_found: int = Field(ge=0)
    empty: int = Field(ge=0)
    answers: int = Field(ge=1)
    completion_tokens: float | None


class ServerScores(SpecModel):
    """One server: its name in this report, the model it says it serves, and its results in order of the tasks."""

    name: str
    model: str
    tasks: tuple[TaskResult, ...]


class ScoresPlan(SpecModel):
    """What decides every answer: names and models of the servers, tasks, sampling."""

    servers: dict[str, str]
    tasks: tuple[TaskFile, ...]
    sampling: Sampling


class ScoresReport(SpecModel):
    """``scores.json``.

    Attributes:
        sampling, tasks: What was asked, and how.
        servers: Side by side.
        pairs: Exact McNemar tests of majority votes, every two servers on every task; not corrected for many.
        resamples: Of the bootstrap.
        files: ``answers.jsonl`` and ``scores.html``.
        digest: SHA-256 of the canonical report without this field.
    """

    format: Literal["kvcq.scores"] = "kvcq.scores"
    version: Literal[1] = 1
    sampling: Sampling
    tasks: tuple[TaskFile, ...]
    servers: tuple[ServerScores, ...]
    pairs: tuple[PairTest, ...] = ()
    resamples: int = Field(ge=1)
    warnings: tuple[str, ...] = ()
    versions: dict[str, str]
    command: str
    files: tuple[FileEntry, ...] = ()
    digest: Sha256 = ""


class AnswerLogHeader(SpecModel):
    """First line of the answers that an interrupted run keeps; the plan is what a run that continues must have."""

    format: Literal["kvcq.answers"] = "kvcq.answers"
    version: Literal[1] = 1
    plan: ScoresPlan
    digest: Sha256 = ""
