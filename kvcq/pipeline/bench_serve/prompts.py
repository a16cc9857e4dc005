"""Requests: seeded prompts of random tokens, all different, so that nothing is shared that was not asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcq.runtime.layout import PAGE
from kvcq.runtime.sglang.filled import PARAM

# In every vocabulary; that some of them are special in one costs no time.
LOW, HIGH = 0, 256


def draw(count: int, length: int, *seed: int) -> NDArray:
    """Return prompts int32 ``[count, length]``; another seed gives others, unlike from their first page on."""
    return np.random.default_rng(seed).integers(LOW, HIGH, (count, length), dtype=np.int32)


def reusable(length: int, recent: int) -> int:
    """Return how many tokens of a prompt a cache can hold for it, whole pages, in every arm alike.

    Args:
        length: Tokens of the prompt.
        recent: Those of its end that kvcq computes anew, whatever is cached.
    """
    return max(0, length - max(recent, 1)) // PAGE * PAGE


def body(ids: Sequence[int] | NDArray, output: int, *, filled: int = 0, interval: int = 1) -> bytes:
    """Return a request to ``/generate``: greedy, streamed, exactly `output` tokens long.

    Args:
        ids: The prompt.
        output: Tokens to generate.
        filled: Tokens of the prompt that a server started for it puts into its cache first.
        interval: Tokens from one event of the stream to the next.
    """
    params: dict[str, Any] = {"max_new_tokens": output, "temperature": 0.0, "ignore_eos": True}
    params["stream_interval"] = interval
    if filled:
        params["custom_params"] = {PARAM: filled}
    plain = {"input_ids": np.asarray(ids).tolist(), "sampling_params": params, "stream": True}
    return json.dumps(plain, separators=(",", ":")).encode()


def interval_for(batch: int) -> int:
    """Return how many tokens lie between two events, so that about 16 of them arrive in a step at most."""
    return max(1, -(-batch // 16))
