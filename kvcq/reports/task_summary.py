"""Selections from model-level scores, and the sentence about one artifact, that every form of a report shows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvcq.reports.text import context_label, factor, number, percent, quantity
from kvcq.spec.report import ArtifactReport, Report
from kvcq.spec.tasks import NeedleScore, TaskScores

_SUBTASK = re.compile(r"^(?:niah[_-])?(single|multikey|multivalue|multiquery)(?:[_-]?(\d+))?$")


class _AtContext(Protocol):
    @property
    def context(self) -> int: ...


Score = TypeVar("Score", bound=_AtContext)


@dataclass(frozen=True)
class Square:
    """All subtasks of one context and depth together: items, mean share of needles found, share with all found."""

    items: int
    score: float
    exact: float


def at_context(scores: Iterable[Score], context: int) -> Score | None:
    """Return the score of one context, if it was measured."""
    return next((score for score in scores if score.context == context), None)


def contexts_of(scores: Iterable[_AtContext]) -> list[int]:
    """Return the contexts of scores, ascending and without repeats."""
    return sorted({score.context for score in scores})


def task_contexts(scores: TaskScores | None) -> list[int]:
    """Return all contexts at which any task measured an artifact, ascending."""
    if scores is None:
        return []
    needles = scores.needle.cells if scores.needle is not None else ()
    return contexts_of([*scores.perplexity, *scores.agreement, *scores.decode_kl, *needles])


def has_tasks(report: Report) -> bool:
    """Say whether any row has model-level scores."""
    return any(row.tasks is not None for row in report.artifacts)


def needle_grid(needle: NeedleScore) -> dict[tuple[int, float], Square]:
    """Return the heat map of one artifact by (context, depth), subtasks weighted by their items."""
    sums: dict[tuple[int, float], tuple[int, float, float]] = {}
    for cell in needle.cells:
        items, score, exact = sums.get((cell.context, cell.depth), (0, 0.0, 0.0))
        sums[cell.context, cell.depth] = (
            items + cell.items,
            score + cell.items * cell.score,
            exact + cell.items * cell.exact,
        )
    return {place: Square(items, score / items, exact / items) for place, (items, score, exact) in sums.items()}


def needle_subtasks(needle: NeedleScore) -> dict[str, Square]:
    """Return each subtask over all contexts and depths, in the order of its first cell."""
    names = dict.fromkeys(cell.task for cell in needle.cells)
    found = {}
    for name in names:
        own = [cell for cell in needle.cells if cell.task == name]
        items = sum(cell.items for cell in own)
        score = sum(cell.items * cell.score for cell in own) / items
        found[name] = Square(items, score, sum(cell.items * cell.exact for cell in own) / items)
    return found


def subtask_label(name: str) -> tuple[str, str]:
    """Return a subtask's heading, and one on two lines where columns are narrow."""
    match = _SUBTASK.match(name)
    if match is None:
        return name, name
    kind, which = match[1], f" {match[2]}" if match[2] else ""
    narrow = f"multi-\n{kind.removeprefix('multi')}{which}" if kind.startswith("multi") else f"{kind}\n{which.strip()}"
    return kind + which, narrow.rstrip()


def closeness(row: ArtifactReport) -> float | None:
    """Return how far the tasks put an artifact from BF16, smaller is closer, by the first task that ran.

    Perplexity ratio, decode KL, needles missed, tokens that differ; the longest context of each.
    """
    scores = row.tasks
    if scores is None:
        return None
    if scores.perplexity:
        return _last(scores.perplexity).ratio
    if scores.decode_kl:
        return _last(scores.decode_kl).kl
    if scores.needle is not None:
        return 1 - scores.needle.score
    return 1 - _last(scores.agreement).agreement if scores.agreement else None


def task_clauses(scores: TaskScores | None) -> list[str]:
    """Say in clauses what the tasks found of one artifact, each at its longest context."""
    if scores is None:
        return []
    clauses = []
    if scores.perplexity:
        last = _last(scores.perplexity)
        at = context_label(last.context)
        clauses.append(f"perplexity {quantity(last.perplexity)} at {at} ({factor(last.ratio)} BF16)")
    if scores.needle is not None:
        clauses.append(f"needles {percent(scores.needle.score)} found")
    if scores.agreement:
        last_agreement = _last(scores.agreement)
        at = context_label(last_agreement.context)
        clauses.append(f"{percent(last_agreement.agreement)} of greedy tokens equal at {at}")
    if scores.decode_kl:
        last_kl = _last(scores.decode_kl)
        clauses.append(f"decode KL {number(last_kl.kl)} nats at {context_label(last_kl.context)}")
    return clauses


def flaws(report: Report) -> str:
    """Count cut answers and failed items of the needle task over all rows; empty when it did not run."""
    found = [row.tasks.needle for row in report.artifacts if row.tasks is not None and row.tasks.needle is not None]
    total = sum(len(needle.items) for needle in found)
    cut, failed = sum(needle.truncated for needle in found), sum(needle.errors for needle in found)
    if not found:
        return ""
    reached = f"{cut} of {total} answers" if cut else "No answer"
    judged = " and were judged as they stood" if cut else ""
    return f"{reached} reached the token limit{judged}; {failed or 'no'} item{'' if failed == 1 else 's'} failed to run"


def _last(scores: tuple[Score, ...]) -> Score:
    return max(scores, key=lambda score: score.context)
