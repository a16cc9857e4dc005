"""Greedy continuations of the BF16 reference, followed by every artifact with the reference's own tokens fed.

One prefill and the same single-token steps serve two tasks, agreement and decode KL. Until an artifact first prefers
another token it has seen what its own greedy generation would have seen, so its first divergence needs no run of its
own. The continuation does not stop at the end-of-text token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcq.evaluation.session import Chunking, Progress, Runner, finite, item, prefill
from kvcq.evaluation.statistics import ratio_interval
from kvcq.spec.tasks import Interval

# Neighbouring steps are dependent: intervals resample blocks of this many, shorter ones where there would be few.
BLOCK = 8
LEAST_BLOCKS = 8

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Trace:
    """What the reference did: `logits` ``[n, vocab]`` float32 of the prompt's last token and of n - 1 steps after it.

    `tokens` ``[n]`` are their arg-maxima; step i feeds ``tokens[i - 1]``.
    """

    logits: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class Steps:
    """Comparison with the reference after one prompt, each ``[n]``; entry 0 belongs to the prompt's last token.

    Attributes:
        kl: KL(P_ref || P) over the full vocabulary, nats.
        same: 1 where the likeliest token is the reference's.
        gap: Log-probability of the reference's likeliest token over that of its second, nats.
        nll: Negative log-likelihood of the reference's token.
        nll_reference: The same under the reference.
    """

    kl: Floats
    same: Floats
    gap: Floats
    nll: Floats
    nll_reference: Floats


Followed = list[dict[int, list[Steps]]]
"""Of each runner, by context, the steps after each prompt."""


def follow(
    runners: Sequence[Runner],
    passages: Sequence[Tensor],
    contexts: Sequence[int],
    count: int,
    *,
    chunking: Chunking,
    progress: Progress,
) -> Followed:
    """Continue the first `context` tokens of every passage by `count` reference tokens, at every context.

    Args:
        runners: The BF16 reference first.
        passages: LongTensors of at least max(contexts) tokens.
        contexts: Context lengths.
        count: Predictions compared, the prompt's own included.
        chunking: How prompts are cut into forwards.
        progress: Told after each prompt of each runner.

    Raises:
        EvaluationError: a prompt failed to run; names runner, context and passage.
    """
    found: Followed = [{context: [] for context in contexts} for _ in runners]
    total, done = len(runners) * len(passages) * len(contexts), 0
    for context in contexts:
        for number, passage in enumerate(passages):
            prompt = passage[:context]
            trace: Trace | None = None
            for runner, own in zip(runners, found, strict=True):
                with item(f"continuation by {runner.name}, context {context}, passage {number}"):
                    if trace is None:
                        trace = lead(runner, prompt, count, chunking)
                        steps = compare(trace, trace.logits)
                    else:
                        steps = compare(trace, replay(runner, prompt, trace, chunking))
                own[context].append(steps)
                done += 1
                progress(done, total)
    return found


@torch.no_grad()
def lead(runner: Runner, prompt: Tensor, count: int, chunking: Chunking) -> Trace:
    """Continue a prompt ``[T]`` greedily to `count` tokens; of equal logits the lowest id wins."""
    session = runner.start(len(prompt))
    logits = [prefill(session, prompt, chunking)]
    for _ in range(count - 1):
        logits.append(finite(session.extend(logits[-1].argmax()[None].cpu()), session)[-1])
    rows = torch.stack(logits)
    return Trace(rows, rows.argmax(-1))


@torch.no_grad()
def replay(runner: Runner, prompt: Tensor, trace: Trace, chunking: Chunking) -> Tensor:
    """Return a runner's logits ``[n, vocab]`` along a trace, one token a forward after the prompt."""
    session = runner.start(len(prompt))
    logits = [prefill(session, prompt, chunking)]
    for token in trace.tokens[:-1].cpu():
        logits.append(finite(session.extend(token[None]), session)[-1])
    return torch.stack(logits)


def compare(trace: Trace, logits: Tensor) -> Steps:
    """Compare logits ``[n, vocab]`` with those of the reference, in float64."""
    rows = [_compare_row(*pair) for pair in zip(trace.logits, logits.to(trace.logits.device), strict=True)]
    return Steps(*np.asarray(rows, np.float64).T)


def _compare_row(reference: Tensor, logits: Tensor) -> tuple[float, float, float, float, float]:
    log_p, log_q = torch.log_softmax(reference.double(), -1), torch.log_softmax(logits.double(), -1)
    token = int(reference.argmax())
    kl = max(0.0, float((log_p.exp() * (log_p - log_q)).sum()))
    first, second = log_p.topk(2).values.tolist()
    return kl, float(token == int(logits.argmax())), first - second, -float(log_q[token]), -first


def blocks(values: Sequence[Floats]) -> tuple[list[float], list[float]]:
    """Return the sums and sizes of the blocks of consecutive steps of all prompts: 8 steps, or an eighth of all."""
    size = max(1, min(BLOCK, sum(map(len, values)) // LEAST_BLOCKS))
    parts = [own[start : start + size] for own in values for start in range(0, len(own), size)]
    return [float(part.sum()) for part in parts], [float(len(part)) for part in parts]


def step_interval(values: Sequence[Floats], seed: int, resamples: int) -> Interval:
    """Return the 95 % interval of the mean over steps, blocks of up to 8 consecutive steps resampled."""
    return ratio_interval(*blocks(values), seed, resamples)
