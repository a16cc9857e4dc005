"""How a token is chosen from logits: greedy, or drawn by a generator of the request's own."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens.

    Attributes:
        temperature: 0 takes the likeliest token, of equal ones the lowest id.
        top_p: Draw from the smallest set of likeliest tokens whose probability reaches this.
        top_k: Draw from so many likeliest tokens at most; 0 from all.
        seed: Seed of the draws; None takes one from the system.
        scores: How many alternatives to tell the log-probabilities of; None tells none at all.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    scores: int | None = None


class Sampler:
    """Chooses the tokens of one request; what it draws depends on its seed and its logits only."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self._generator = torch.Generator().manual_seed(seed)

    def choose(self, logits: Tensor) -> int:
        """Return a token id for float32 logits ``[vocab]``."""
        settings = self.sampling
        if settings.temperature == 0:
            return int(logits.argmax())
        # Subtracted first: a tiny temperature must not divide to infinity.
        scaled = (logits - logits.max()).double() / settings.temperature
        ordered, ids = scaled.softmax(-1).cpu().sort(descending=True, stable=True)
        kept = len(ordered)
        if settings.top_k:
            kept = min(kept, settings.top_k)
        if settings.top_p < 1:
            before = ordered.cumsum(-1) - ordered
            kept = min(kept, max(int((before < settings.top_p).sum()), 1))
        drawn = torch.multinomial(ordered[:kept], 1, generator=self._generator)
        return int(ids[drawn])


def score(logits: Tensor, token: int, top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return the log-probability of a token in nats, and the `top` likeliest ids with theirs.

    They are the model's own, at temperature 1 and without top-p or top-k.

    Args:
        logits: float32 ``[vocab]``.
        token: Its id.
        top: How many, 0 for none.
    """
    probs = logits.log_softmax(-1)
    best = probs.topk(min(top, len(probs)))
    return float(probs[token]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
