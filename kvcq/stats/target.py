"""Statistics of a longer context than was collected: moments averaged over positions, rows turned to new ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvcq.errors import InputError, UnsupportedError
from kvcq.stats.rotary import average_mean, average_second, mean_rotation_moments, rotate
from kvcq.stats.view import LayerStats, ProbeRows


def retarget(stats: LayerStats, target_context: int, sink: int, seed: int, collected: int | None = None) -> LayerStats:
    """Move a layer's statistics to positions uniform in ``[sink, target_context)``.

    k and q moments are averaged exactly from their position-0 form; rows below `sink` are dropped, the others turn to
    independent seeded positions; each probe shifts as a whole. Values need nothing. The attention-output moment keeps
    the collected length: it is no function of positions.

    Args:
        stats: The layer as collected.
        target_context: Context length to be served.
        sink: Tokens at the start that are kept exact, hence never coded.
        seed: Seed of the new positions; layers share them.
        collected: Longest collected sequence. A layer that does not un-rotate passes unchanged up to it.

    Raises:
        InputError: the target leaves no position to code.
        UnsupportedError: the layer does not un-rotate and the target exceeds `collected`.
    """
    if target_context <= sink:
        raise InputError(
            f"a target context of {target_context} tokens lies within the {sink} exact sink tokens",
            where="--target-context",
            fix="choose a longer target or a smaller sink window",
        )
    if not stats.geometry.unrotates:
        if collected is not None and target_context <= collected:
            return stats
        raise UnsupportedError(
            f"layer {stats.geometry.layer} does not un-rotate, so its statistics hold only as collected",
            where="--target-context",
            fix=f"collect on sequences of {target_context} tokens, or leave the target out",
        )
    generator = np.random.Generator(np.random.Philox(seed))
    rows = _draw(generator, stats.row_positions, sink, target_context)
    queries = _draw(generator, stats.q_row_positions, sink, target_context)
    shifts = [int(generator.integers(0, max(target_context - int(probe.positions.max()), 1))) for probe in stats.probes]
    keep, q_keep = stats.row_positions >= sink, stats.q_row_positions >= sink
    return replace(
        stats,
        moments=_average(stats, sink, target_context),
        k_rows=rotate(stats.k_rows, rows - stats.row_positions, stats.rope)[:, keep],
        v_rows=stats.v_rows[:, keep],
        q_rows=rotate(stats.q_rows, queries - stats.q_row_positions, stats.rope)[:, q_keep],
        row_positions=rows[keep],
        q_row_positions=queries[q_keep],
        probes=tuple(_shift(stats, probe, by) for probe, by in zip(stats.probes, shifts, strict=True)),
    )


def _draw(generator: np.random.Generator, old: Tensor, lo: int, hi: int) -> Tensor:
    return torch.from_numpy(generator.integers(lo, hi, size=len(old), dtype=np.int64))


def _average(stats: LayerStats, lo: int, hi: int) -> dict[str, Tensor]:
    moments = dict(stats.moments)
    if stats.rope is None:
        return moments
    over = mean_rotation_moments(stats.rope, lo, hi, stats.geometry.d_k)
    for name in ("k", "q"):
        moments[f"{name}_mean"] = average_mean(moments[f"{name}0_mean"], stats.rope, over)
        second = average_second(moments[f"{name}0_second"], stats.rope, over)
        moments[f"{name}_second"] = (second + second.transpose(-1, -2)) / 2
    return moments


def _shift(stats: LayerStats, probe: ProbeRows, by: int) -> ProbeRows:
    turned = torch.full_like(probe.positions, by)
    return replace(
        probe,
        k=rotate(probe.k, turned, stats.rope),
        q=rotate(probe.q, turned[: probe.q.shape[1]], stats.rope),
        positions=probe.positions + by,
    )
