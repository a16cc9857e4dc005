"""Runners of tests: a tiny model on the library's own cache, with faults on demand."""

from __future__ import annotations

import torch

from kvcq.models.library import forward, new_cache
from tests.tiny import tiny_model


class PlainSession:
    def __init__(self, model, change):
        self.model, self.change = model, change
        self.cache, self.length = new_cache(model), 0

    def extend(self, tokens, keep=1):
        logits = forward(self.model, tokens[None], cache=self.cache)[0]
        self.length += len(tokens)
        return self.change(logits[-keep:], self.length)


class PlainRunner:
    """The untouched model; `change(logits, length)` alters what it returns."""

    def __init__(self, name="bf16 reference", model=None, change=lambda logits, length: logits):
        self.name, self.model, self.change, self.forwards = name, model or tiny_model("llama"), change, 0

    def start(self, prompt):
        assert prompt >= 1
        return PlainSession(self.model, self._count)

    def _count(self, logits, length):
        self.forwards += 1
        return self.change(logits, length)


def scaled(factor):
    """Logits times `factor`: another temperature, the same arg-max."""
    return lambda logits, length: logits * factor


def passages(count, length, seed=0, vocab=128):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (length,), generator=generator) for _ in range(count)]


def quiet(done, total):
    assert 0 < done <= total
