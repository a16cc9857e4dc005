"""From answers to scores: every answer judged, then summed up by server and task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from kvcq.evaluation.questions import Question
from kvcq.evaluation.scoring.score import score
from kvcq.evaluation.statistics import RESAMPLES, few_items, majority, mean_interval, pair_tests
from kvcq.pipeline.progress import Reporter
from kvcq.spec import canonical
from kvcq.spec.scores import Answer, JudgedAnswer, ServerScores, TaskFile, TaskResult
from kvcq.spec.tasks import PairTest

RIGHT = 1.0


def task_files(questions: Sequence[Question]) -> tuple[TaskFile, ...]:
    """Describe the tasks of questions that are sorted by task."""
    found = []
    for task, group in groupby(questions, key=lambda question: question.task):
        own = list(group)
        plain = [[question.id, question.row.plain(), question.tokens, question.max_tokens] for question in own]
        metrics = dict(sorted(Counter(question.row.metric for question in own).items()))
        digest = canonical.sha256(b"".join(canonical.dumps(item) for item in plain))
        found.append(TaskFile(task=task, items=len(own), sha256=digest, metrics=dict(metrics)))
    return tuple(found)


def judge(
    questions: Sequence[Question], answers: Sequence[Answer], code_seconds: float, reporter: Reporter
) -> list[JudgedAnswer]:
    """Judge every answer, in order.

    Raises:
        UnavailableError, EvaluationError: see `score`.
    """
    by_key = {(question.task, question.id): question for question in questions}
    reporter.stage("judging answers")
    judged = []
    for number, answer in enumerate(answers, start=1):
        verdict = score(by_key[answer.task, answer.item], answer.text, code_seconds=code_seconds)
        judged.append(JudgedAnswer(**answer.model_dump(), score=verdict.score, found=verdict.found, note=verdict.note))
        reporter.advance(number, len(answers), "answers")
    return judged


def server_scores(
    models: Mapping[str, str], tasks: Sequence[TaskFile], judged: Sequence[JudgedAnswer], samples: int, seed: int
) -> tuple[ServerScores, ...]:
    """Sum up by server and task.

    Args:
        models: Served model by server name, in order.
        tasks: The tasks, in order.
        judged: Answers by server, then task, then item, then sample.
        samples: Answers to each item.
        seed: Of the bootstrap.
    """
    given = iter(judged)
    servers = []
    for name, model in models.items():
        rows = []
        for task in tasks:
            own = [[next(given) for _ in range(samples)] for _ in range(task.items)]
            rows.append(_task_result(task.task, own, seed))
        servers.append(ServerScores(name=name, model=model, tasks=tuple(rows)))
    return tuple(servers)


def compare(
    models: Mapping[str, str], tasks: Sequence[TaskFile], judged: Sequence[JudgedAnswer]
) -> tuple[PairTest, ...]:
    """Test every two servers on every task by the majority votes on its items."""
    tests: list[PairTest] = []
    for task in tasks:
        own = [answer for answer in judged if answer.task == task.task]
        outcomes = [(name, majority(_votes([answer for answer in own if answer.server == name]))) for name in models]
        tests += pair_tests(task.task, outcomes)
    return tuple(tests)


def score_warnings(
    servers: Sequence[ServerScores], judged: Sequence[JudgedAnswer], samples: int, temperature: float, items: int
) -> list[str]:
    """Say what makes the scores less than they seem."""
    found = []
    for server in servers:
        for row in server.tasks:
            if row.truncated:
                found.append(
                    f"{server.name}: {row.truncated} of {row.answers} answers to {row.task} were cut by their token "
                    "limit; they count as they stand"
                )
            if row.not_found:
                found.append(f"{server.name}: no answer could be read out of {row.not_found} texts of {row.task}")
    if samples > 1 and temperature == 0:
        found.append("temperature 0 makes the samples of an item equal, except for what a server does not repeat")
    elif samples > 1:
        for name in _repeating(judged):
            found.append(f"{name}: all samples of every item are equal; does the server take seed and temperature?")
    found += few_items(items)
    return found


def _task_result(task: str, items: Sequence[Sequence[JudgedAnswer]], seed: int) -> TaskResult:
    answers = [answer for item in items for answer in item]
    means = [sum(answer.score for answer in item) / len(item) for item in items]
    counts = [answer.completion_tokens for answer in answers if answer.completion_tokens is not None]
    return TaskResult(
        task=task,
        score=sum(answer.score for answer in answers) / len(answers),
        interval=mean_interval(means, seed, RESAMPLES),
        majority=sum(majority([[a.score >= RIGHT for a in item] for item in items])) / len(items),
        truncated=sum(answer.truncated for answer in answers),
        not_found=sum(not answer.found for answer in answers),
        empty=sum(not answer.text.strip() for answer in answers),
        answers=len(answers),
        completion_tokens=sum(counts) / len(counts) if len(counts) == len(answers) else None,
    )


def _repeating(judged: Sequence[JudgedAnswer]) -> list[str]:
    """Return the servers whose answers to an item never differ."""
    texts: dict[str, dict[tuple[str, str], set[str]]] = {}
    for answer in judged:
        texts.setdefault(answer.server, {}).setdefault((answer.task, answer.item), set()).add(answer.text)
    return [name for name, items in texts.items() if all(len(found) == 1 for found in items.values())]


def _votes(answers: Sequence[JudgedAnswer]) -> list[list[bool]]:
    return [[a.score >= RIGHT for a in group] for _, group in groupby(answers, key=lambda answer: answer.item)]
