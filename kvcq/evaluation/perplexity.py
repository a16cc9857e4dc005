"""Teacher-forced perplexity through a quantized cache.

A passage is read from its start in chunks, each attending to an already quantized history, so exactness is the
cache's own rule. At context C the tokens of the second half, positions C/2 to C - 1, are scored: each is predicted
from at least C/2 tokens. A prediction depends on the past only, so one reading serves every context: passages are
read once, at the longest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcq.errors import EvaluationError
from kvcq.evaluation.session import Chunking, Progress, Runner, finite, item
from kvcq.evaluation.statistics import RESAMPLES, bootstrap
from kvcq.spec.tasks import PerplexityScore

SCORE_FROM = 0.5
BLOCK = 64
LEAST_BLOCKS = 8
# exp of a larger loss is beyond float64; such a model is broken in any case.
LARGEST_LOSS = 700.0

Losses = NDArray[np.float64]


@dataclass(frozen=True)
class Reading:
    """Losses of the tokens ``[first, first + len(losses))`` of one passage, nats."""

    first: int
    losses: Losses


def first_scored(context: int) -> int:
    """Return the first scored position of a context."""
    return max(1, int(context * SCORE_FROM))


@torch.no_grad()
def read_passage(runner: Runner, tokens: Tensor, first: int, chunking: Chunking) -> Reading:
    """Read one passage ``[T]`` in chunks and return the losses of the tokens first..T-1.

    Raises:
        EvaluationError: logits that are not finite.
    """
    # The last token predicts nothing that is scored.
    prompt = len(tokens) - 1
    session = runner.start(prompt)
    losses = []
    for start, stop in chunking.spans(prompt):
        keep = stop - max(start, first - 1)
        logits = finite(session.extend(tokens[start:stop], max(keep, 1)), session)
        if keep > 0:
            targets = tokens[stop - keep + 1 : stop + 1, None].to(logits.device)
            chosen = torch.log_softmax(logits, -1).gather(-1, targets)[:, 0]
            losses.append(-chosen.double().cpu().numpy())
    return Reading(first, np.concatenate(losses))


def measure_perplexity(
    runners: Sequence[Runner],
    passages: Sequence[Tensor],
    contexts: Sequence[int],
    *,
    chunking: Chunking,
    seed: int = 0,
    resamples: int = RESAMPLES,
    progress: Progress,
) -> list[tuple[PerplexityScore, ...]]:
    """Measure every runner on the same passages, one tuple of scores (by ascending context) a runner.

    The bootstrap draws blocks of about 64 consecutive scored tokens of all passages with replacement: neighbouring
    tokens are dependent, so single tokens would give intervals that are too narrow.

    Args:
        runners: The BF16 reference first.
        passages: LongTensors of at least max(contexts) tokens.
        contexts: Context lengths.
        chunking: How passages are cut into forwards.
        seed: Of the bootstrap.
        resamples: Of the bootstrap.
        progress: Told after each passage of each runner.

    Raises:
        EvaluationError: a passage failed to run; names runner and passage.
    """
    contexts = sorted(contexts)
    readings: list[list[Reading]] = [[] for _ in runners]
    total = len(passages) * len(runners)
    for number, passage in enumerate(passages):
        for own, runner in zip(readings, runners, strict=True):
            with item(f"perplexity of {runner.name}, passage {number}"):
                own.append(read_passage(runner, passage[: contexts[-1]], first_scored(contexts[0]), chunking))
            progress(sum(map(len, readings)), total)
    sums = [[block_sums(own, context) for context in contexts] for own in readings]
    return [
        tuple(
            _score(context, len(passages), *mine, exact[0], seed, resamples)
            for context, mine, exact in zip(contexts, own, sums[0], strict=True)
        )
        for own in sums
    ]


def block_sums(readings: Sequence[Reading], context: int) -> tuple[Losses, Losses]:
    """Return (summed loss, tokens) of the blocks of all passages' scored tokens at a context, each ``[blocks]``.

    A passage is cut into blocks of equal length, up to one token: as many as fit with 64 tokens each, and at least 8,
    as a single block would pass for certainty.
    """
    first = first_scored(context)
    count = min(max(LEAST_BLOCKS, (context - first) // BLOCK), context - first)
    parts = [
        part for own in readings for part in np.array_split(own.losses[first - own.first : context - own.first], count)
    ]
    return np.asarray([math.fsum(part) for part in parts]), np.asarray([len(part) for part in parts], np.float64)


def _score(
    context: int, passages: int, losses: Losses, counts: Losses, exact: Losses, seed: int, resamples: int
) -> PerplexityScore:
    tokens = int(counts.sum())
    loss, reference = math.fsum(losses), math.fsum(exact)
    if loss / tokens > LARGEST_LOSS:
        raise EvaluationError(f"a loss of {loss / tokens:.3g} nats a token has no perplexity", where="perplexity")
    own = bootstrap(np.column_stack([losses, counts]), lambda s: np.exp(s[:, 0] / s[:, 1]), seed, resamples)
    ratio = bootstrap(np.column_stack([losses - exact, counts]), lambda s: np.exp(s[:, 0] / s[:, 1]), seed, resamples)
    return PerplexityScore(
        context=context,
        passages=passages,
        tokens=tokens,
        nll=loss,
        perplexity=math.exp(loss / tokens),
        interval=own,
        ratio=math.exp((loss - reference) / tokens),
        ratio_interval=ratio,
        block_nll=tuple(float(value) for value in losses),
        block_tokens=tuple(int(value) for value in counts),
    )
