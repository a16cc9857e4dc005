"""Frequencies of RoPE out of the settings that a configuration states, to hold a bundle's against."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from kvcq.spec.geometry import RopeSpec

# Frequencies differ in their last bits between devices.
CLOSE = 1e-4


def differs(rope: RopeSpec, stated: Mapping[str, Any], dims: int) -> bool:
    """Tell whether a bundle's RoPE is beyond doubt another one than the one stated.

    Args:
        rope: Of the bundle, of the same kind as the stated one.
        stated: ``rope_type``, ``rope_theta`` and what its kind needs; what lacks a number is not compared.
        dims: Channels of a head.
    """
    turning = int(dims * float(stated.get("partial_rotary_factor") or 1.0))
    if stated.get("rope_type") not in KINDS or turning < 2:
        return False
    if turning // 2 != len(rope.inv_freq):
        return True
    try:
        wanted, scaling = KINDS[stated["rope_type"]](stated, turning)
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return False
    pairs = [*zip(wanted, rope.inv_freq, strict=True), (scaling, rope.attention_scaling)]
    return not all(math.isclose(a, b, rel_tol=CLOSE) for a, b in pairs)


def _plain(stated: Mapping[str, Any], dims: int) -> tuple[list[float], float]:
    theta = float(stated["rope_theta"])
    return [theta ** (-2 * index / dims) for index in range(dims // 2)], 1.0


def _linear(stated: Mapping[str, Any], dims: int) -> tuple[list[float], float]:
    factor = float(stated["factor"])
    return [value / factor for value in _plain(stated, dims)[0]], 1.0


def _llama3(stated: Mapping[str, Any], dims: int) -> tuple[list[float], float]:
    """Slow frequencies are divided, fast ones stay, those between are blended."""
    factor, length = float(stated["factor"]), float(stated["original_max_position_embeddings"])
    low, high = float(stated["low_freq_factor"]), float(stated["high_freq_factor"])
    found = []
    for value in _plain(stated, dims)[0]:
        share = min(max((length * value / (2 * math.pi) - low) / (high - low), 0.0), 1.0)
        found.append((1 - share) * value / factor + share * value)
    return found, 1.0


def _yarn(stated: Mapping[str, Any], dims: int) -> tuple[list[float], float]:
    """Frequencies are blended along a ramp over their index, and rotated vectors are scaled."""
    factor, length = float(stated["factor"]), float(stated["original_max_position_embeddings"])
    theta = float(stated["rope_theta"])

    def border(turns: float) -> float:
        return dims * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = border(float(stated.get("beta_fast") or 32)), border(float(stated.get("beta_slow") or 1))
    if stated.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = (high - low) or 0.001
    found = []
    for index, value in enumerate(_plain(stated, dims)[0]):
        share = min(max((index - low) / width, 0.0), 1.0)
        found.append(share * value / factor + (1 - share) * value)
    return found, _yarn_scaling(stated, factor)


def _yarn_scaling(stated: Mapping[str, Any], factor: float) -> float:
    if stated.get("attention_factor") is not None:
        return float(stated["attention_factor"])

    def scale(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    whole, part = stated.get("mscale"), stated.get("mscale_all_dim")
    return scale(float(whole)) / scale(float(part)) if whole and part else scale(1.0)


Kind = Callable[[Mapping[str, Any], int], tuple[list[float], float]]
KINDS: dict[str, Kind] = {"default": _plain, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
