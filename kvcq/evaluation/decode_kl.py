"""Decode KL: next-token distributions of single-token steps on a quantized history, against the BF16 reference.

The protocol of the papers' KL by context, at the model's output: read the context in chunks, then feed the exact
model's own tokens, one a forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcq.evaluation.continuation import Steps, step_interval
from kvcq.evaluation.statistics import RESAMPLES
from kvcq.spec.tasks import DecodeKLScore

STEPS = 32


def decode_kl_score(
    context: int, passages: Sequence[Steps], steps: int = STEPS, *, seed: int = 0, resamples: int = RESAMPLES
) -> DecodeKLScore:
    """Score the first `steps` single-token steps after every passage of one context.

    Entry 0 of `Steps` is left out: those logits come from the prefill.

    Raises:
        ValueError: no passages, or fewer steps.
    """
    if not passages or any(len(own.kl) <= steps for own in passages):
        raise ValueError(f"{steps} decode steps need passages that were followed so far")
    part = slice(1, steps + 1)
    kl = [own.kl[part] for own in passages]
    median, p90 = np.quantile(np.concatenate(kl), [0.5, 0.9])
    return DecodeKLScore(
        context=context,
        passages=len(passages),
        steps=steps * len(passages),
        kl=float(np.concatenate(kl).mean()),
        interval=step_interval(kl, seed, resamples),
        kl_median=float(median),
        kl_p90=float(p90),
        kl_max=float(max(own.max() for own in kl)),
        top1=float(np.mean([own.same[part] for own in passages])),
        nll=float(np.mean([own.nll[part] for own in passages])),
        nll_reference=float(np.mean([own.nll_reference[part] for own in passages])),
    )
