"""The integer formulas of the golden examples (16 tokens, 2 query heads, 1 KV head, d = 8) and their values."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

T, HQ, D = 16, 2, 8


@functools.cache
def golden() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "values.json").read_text())


def queries() -> Tensor:
    """q [2, 16, 8] float64."""
    h, t, i = torch.meshgrid(torch.arange(HQ), torch.arange(T), torch.arange(D), indexing="ij")
    return ((5 * t + 3 * i + 2 * h * i + t * i * (h + 1) + t * t) % 13 - 6).double() / 4


def keys() -> Tensor:
    """k [1, 16, 8] float64."""
    t, i = torch.meshgrid(torch.arange(T), torch.arange(D), indexing="ij")
    return (((7 * t + 3 * i + t * i * i + t * t) % 11 - 5).double() / 4 + 0.5 * (i == 1))[None]


def values() -> Tensor:
    """v [1, 16, 8] float64."""
    t, i = torch.meshgrid(torch.arange(T), torch.arange(D), indexing="ij")
    return (((3 * t + 5 * i + t * i * i + 2 * t * t) % 13 - 6).double() / 4)[None]


def query_moment() -> Tensor:
    """C_Q [1, 8, 8]: mean of q^T q over tokens and query heads."""
    rows = queries().flatten(0, 1)
    return (rows.T @ rows / len(rows))[None]


def key_moments() -> tuple[Tensor, Tensor]:
    """Mean [1, 8] and centred covariance [1, 8, 8] of the keys."""
    mu = keys().mean(1)
    centred = keys() - mu[:, None]
    return mu, centred.mT @ centred / T


def close(actual: Any, expected: Any, atol: float = 1e-7) -> None:
    actual = torch.as_tensor(actual, dtype=torch.float64)
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), atol=atol, rtol=0.0)
