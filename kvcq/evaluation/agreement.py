"""Agreement of greedy generation with the BF16 reference: where it first differs, and how often.

The near-tie rule for two implementations of one cache (top-2 gap below twice the logit error of the step) holds
at *every* first divergence, as the arg-max cannot change otherwise; against BF16 it would tell nothing. Here a
divergence is a near-tie where the reference itself is undecided: its two likeliest tokens within `NEAR_TIE` nats.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcq.evaluation.continuation import Steps, step_interval
from kvcq.evaluation.statistics import RESAMPLES
from kvcq.spec.tasks import AgreementScore

NEW_TOKENS = 128
NEAR_TIE = 0.1


def agreement_score(
    context: int, prompts: Sequence[Steps], count: int, *, seed: int = 0, resamples: int = RESAMPLES
) -> AgreementScore:
    """Score the first `count` tokens after every prompt of one context.

    Raises:
        ValueError: no prompts, or fewer steps than `count`.
    """
    if not prompts or any(len(steps.kl) < count for steps in prompts):
        raise ValueError(f"agreement over {count} tokens needs prompts that were followed so far")
    same = [steps.same[:count] for steps in prompts]
    kl = np.concatenate([steps.kl[:count] for steps in prompts])
    first = [_first(row == 0.0) for row in same]
    return AgreementScore(
        context=context,
        prompts=len(prompts),
        tokens=count * len(prompts),
        first_divergence=tuple(first),
        near_ties=sum(
            bool(steps.gap[at] < NEAR_TIE) for steps, at in zip(prompts, first, strict=True) if at is not None
        ),
        agreement=float(np.concatenate(same).mean()),
        interval=step_interval(same, seed, resamples),
        kl=float(kl.mean()),
        kl_max=float(kl.max()),
    )


def _first(different: np.ndarray) -> int | None:
    at = np.flatnonzero(different)
    return int(at[0]) if len(at) else None
