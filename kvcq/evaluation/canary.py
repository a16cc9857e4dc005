"""The canary: recorded log-probabilities by which a running server proves that this bundle is on.

Three passages of our own are read as two served chunks with a cached boundary, so that the second chunk attends
to quantized history only. With b the exact, s the quantized and x the server's log-probs, the pooled statistic
``sum (x - b)(s - b) / sum (s - b)^2`` is near 1 when the server quantizes as recorded and near 0 when it does not.
It detects *off* and *wrong bundle*; it is no accuracy test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcq.errors import EvaluationError, InputError
from kvcq.evaluation.attention import evenly_spaced
from kvcq.evaluation.simulate import exact_served
from kvcq.spec.boundary import Boundary
from kvcq.spec.plan import Windows

Logits = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""``(tokens [T] int64, positions [n] int64, exact [T, T] bool or None) -> logits [n, vocab]``.

With a mask: attention over exact and decoded rows in every quantized layer; None: the untouched model.
"""
Encode = Callable[[str], Sequence[int]]

HISTORY = 192
POSITIONS = 64
TOP = 32
ACTIVE = 0.7
OFF = 0.3


@dataclass(frozen=True)
class CanaryRecord:
    """What the canary file holds.

    Attributes:
        arrays: ``tokens`` int32 ``[3, T]``; ``positions`` int32 ``[n]``, the log-probs at p are of token p + 1;
            ``ids`` int32 ``[3, n, 32]``, the exact model's likeliest tokens; ``b``, ``s`` float32 ``[3, n, 32]``,
            exact and quantized log-probs of `ids` in nats.
        deviation: RMS of s - b, nats.
        tokens: Length T of each passage.
    """

    arrays: dict[str, NDArray]
    deviation: float
    tokens: int


def canary_passages() -> tuple[str, ...]:
    """Return the packaged passages: plain ASCII, each with facts that come back after they have left the window."""
    text = files("kvcq.evaluation").joinpath("passages.txt").read_text(encoding="ascii")
    return tuple(part.strip() for part in text.split("%%"))


def canary_length(windows: Windows) -> int:
    """Return the tokens of a canary passage, sink + recent + 192."""
    return windows.sink + windows.recent + HISTORY


def canary_boundary(windows: Windows) -> int:
    """Return where the second chunk starts: T - recent, and at least 64 tokens before the end."""
    return canary_length(windows) - max(windows.recent, POSITIONS)


def build_canary(logits: Logits, encode: Encode, windows: Windows) -> CanaryRecord:
    """Record the canary of one artifact.

    Args:
        logits: The model, exact or with this artifact's codecs; called twice a passage.
        encode: Text to token ids, with the special tokens that a prompt starts with.
        windows: The artifact's exact windows.

    Raises:
        InputError: the tokenizer gives no tokens.
        EvaluationError: log-probs are not finite.
    """
    length, boundary = canary_length(windows), canary_boundary(windows)
    exact = exact_served(length, [Boundary(boundary, "cached")], windows)
    # The last position predicts a token that is not in the prompt: servers do not return it as an input log-prob.
    positions = evenly_spaced(boundary, length - 2, POSITIONS)
    tokens, ids, b, s = [], [], [], []
    for text in canary_passages():
        row = _tokens(encode, text, length)
        reference, quantized = (_log_probs(logits, row, positions, mask) for mask in (None, exact))
        top = reference.topk(min(TOP, reference.shape[-1])).indices
        tokens.append(row)
        ids.append(top)
        b.append(reference.gather(-1, top))
        s.append(quantized.gather(-1, top))
    arrays: dict[str, NDArray] = {
        "tokens": torch.stack(tokens).numpy().astype(np.int32),
        "positions": positions.numpy().astype(np.int32),
        "ids": torch.stack(ids).numpy().astype(np.int32),
        "b": torch.stack(b).numpy().astype(np.float32),
        "s": torch.stack(s).numpy().astype(np.float32),
    }
    difference = arrays["s"].astype(np.float64) - arrays["b"]
    return CanaryRecord(arrays, float(np.sqrt(np.mean(difference**2))), length)


def canary_statistic(x: NDArray, b: NDArray, s: NDArray) -> float:
    """Return the pooled ``sum (x - b)(s - b) / sum (s - b)^2``: 1 for x = s, 0 for x = b.

    Args:
        x: The server's log-probs of the recorded ids, any shape.
        b: Exact log-probs, same shape.
        s: Quantized log-probs, same shape.

    Raises:
        EvaluationError: x is not finite or of another shape, or s equals b so that nothing can be told.
    """
    x, b, s = (np.asarray(values, dtype=np.float64) for values in (x, b, s))
    if x.shape != b.shape or not np.isfinite(x).all():
        raise EvaluationError("the server's canary log-probs are incomplete or not finite", where="canary")
    energy = float(((s - b) ** 2).sum())
    if energy == 0.0:
        raise EvaluationError("quantized and exact log-probs of the canary are equal: it cannot prove anything")
    return float(((x - b) * (s - b)).sum() / energy)


def canary_verdict(statistic: float) -> Literal["active", "off", "undecided"]:
    """Judge a statistic: active from 0.7, off up to 0.3, undecided between (also for NaN)."""
    if statistic >= ACTIVE:
        return "active"
    return "off" if statistic <= OFF else "undecided"


def _tokens(encode: Encode, text: str, length: int) -> Tensor:
    """Tokenize the text, repeated as a whole until it fills `length` tokens."""
    repeats = 1
    while len(ids := list(encode("\n\n".join([text] * repeats)))) < length:
        if repeats > length:
            raise InputError("the tokenizer gives no tokens for the canary passages", where="tokenizer")
        repeats *= 2
    return torch.tensor(ids[:length], dtype=torch.int64)


def _log_probs(logits: Logits, tokens: Tensor, positions: Tensor, exact: Tensor | None) -> Tensor:
    with torch.no_grad():
        result = torch.log_softmax(logits(tokens, positions, exact).double(), -1).cpu()
    if not torch.isfinite(result).all():
        path = "exact" if exact is None else "quantized"
        raise EvaluationError(f"the {path} model's log-probs are not finite", where="canary")
    return result
