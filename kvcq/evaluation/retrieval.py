"""Asking needle questions: greedy answers by every runner, scored by the share of needles in them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import tensor

from kvcq.evaluation.needle import Question, found
from kvcq.evaluation.session import Chunking, Progress, Runner, greedy, item, prefill
from kvcq.evaluation.statistics import RESAMPLES, mean_interval, pair_tests
from kvcq.spec.tasks import NeedleCell, NeedleItem, NeedleLength, NeedleScore, PairTest

Decode = Callable[[Sequence[int]], str]


def ask(
    runners: Sequence[Runner],
    questions: Sequence[Question],
    *,
    decode: Decode,
    stop: Collection[int],
    chunking: Chunking,
    progress: Progress,
) -> list[list[NeedleItem]]:
    """Answer every question by every runner; one list of items, in order of the questions, a runner.

    Args:
        runners: Artifacts and the reference.
        questions: The items.
        decode: Token ids to text, special tokens left out.
        stop: Tokens that end an answer.
        chunking: How prompts are cut into forwards.
        progress: Told after each answer.

    Raises:
        EvaluationError: an item failed to run; names it and the runner.
    """
    answered: list[list[NeedleItem]] = [[] for _ in runners]
    total = len(runners) * len(questions)
    for question in questions:
        prompt = tensor(question.tokens)
        for runner, own in zip(runners, answered, strict=True):
            with item(f"{question.name}, {runner.name}"):
                session = runner.start(len(prompt))
                logits = prefill(session, prompt, chunking)
                answer = greedy(session, logits, question.new_tokens, stop)
                own.append(_item(question, decode(answer.tokens), len(answer.tokens), answer.truncated))
            progress(sum(map(len, answered)), total)
    return answered


def needle_score(items: Sequence[NeedleItem], *, seed: int = 0, resamples: int = RESAMPLES) -> NeedleScore:
    """Pool the answers of one runner; intervals resample items.

    Raises:
        ValueError: no items.
    """
    contexts = sorted({entry.context for entry in items})
    cells = dict.fromkeys((entry.context, entry.depth, entry.task) for entry in items)
    return NeedleScore(
        score=_mean(items),
        interval=mean_interval(_shares(items), seed, resamples),
        exact=_exact(items),
        truncated=sum(entry.truncated for entry in items),
        errors=0,
        lengths=tuple(_length(context, items, seed, resamples) for context in contexts),
        cells=tuple(_cell(cell, items) for cell in sorted(cells)),
        items=tuple(items),
    )


def needle_pairs(answered: Sequence[tuple[str, Sequence[NeedleItem]]]) -> tuple[PairTest, ...]:
    """Compare every two runners, given as (name, items), by whether all needles of an item were found."""
    return pair_tests("needle", [(name, [entry.found == entry.asked for entry in items]) for name, items in answered])


def _item(question: Question, answer: str, new_tokens: int, truncated: bool) -> NeedleItem:
    return NeedleItem(
        context=question.context,
        depth=question.depth,
        task=question.task,
        row=question.row,
        found=found(answer, question.answers),
        asked=len(question.answers),
        prompt_tokens=len(question.tokens),
        new_tokens=new_tokens,
        truncated=truncated,
    )


def _shares(items: Sequence[NeedleItem]) -> list[float]:
    return [entry.found / entry.asked for entry in items]


def _mean(items: Sequence[NeedleItem]) -> float:
    return sum(_shares(items)) / len(items)


def _exact(items: Sequence[NeedleItem]) -> float:
    return sum(entry.found == entry.asked for entry in items) / len(items)


def _length(context: int, items: Sequence[NeedleItem], seed: int, resamples: int) -> NeedleLength:
    own = [entry for entry in items if entry.context == context]
    interval = mean_interval(_shares(own), seed, resamples)
    return NeedleLength(context=context, items=len(own), score=_mean(own), interval=interval, exact=_exact(own))


def _cell(cell: tuple[int, float, str], items: Sequence[NeedleItem]) -> NeedleCell:
    own = [entry for entry in items if (entry.context, entry.depth, entry.task) == cell]
    context, depth, task = cell
    return NeedleCell(context=context, depth=depth, task=task, items=len(own), score=_mean(own), exact=_exact(own))
