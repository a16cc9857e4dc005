"""What a reader of the numbers must be told in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvcq.spec.plan import LayerPlan
from kvcq.spec.report import LayerReport

MEAN_RATIO = 4.0
COLLAPSE = 1.0
SHARED_COST = 1.25
NAMED = 8


def centring_warnings(plan: Sequence[LayerPlan], mean_ratios: Mapping[int, float]) -> list[str]:
    """Warn of quantized layers whose keys have a mean far larger than their spread, coded without an offset.

    Args:
        plan: All layers of the artifact.
        mean_ratios: |mean k|^2 / variance by layer id, the largest over the KV heads.
    """
    layers = [
        entry.layer
        for entry in plan
        if entry.k is not None and not entry.k.absorbs_mean and mean_ratios.get(entry.layer, 0.0) > MEAN_RATIO
    ]
    if not layers:
        return []
    worst = max(layers, key=lambda layer: mean_ratios[layer])
    return [
        f"{_layers(layers)}: the keys' mean outweighs their spread (|mean|^2 / variance {mean_ratios[worst]:.1f} "
        f"in layer {worst}) and the codec does not subtract it, so the codes describe the mean: "
        f"use a centred method (oscar-centered, nova), or keep the layers in BF16 with "
        f"--set skip_layers={','.join(map(str, sorted(layers)))}"
    ]


def rank_warnings(ranks: Mapping[int, Sequence[float]]) -> list[str]:
    """Warn of layers whose moments do not span their channels: what the text never reached is fitted to nothing.

    Args:
        ranks: Of each layer (head dimension, smallest rank of key covariance, query moment and value covariance).
    """
    short = {layer: min(row[1:]) for layer, row in ranks.items() if min(row[1:]) < row[0]}
    if not short:
        return []
    worst = min(short, key=lambda layer: short[layer])
    return [
        f"{_layers(list(short))}: moments of rank {short[worst]:.0f} for {ranks[worst][0]:.0f} channels in layer "
        f"{worst}: directions that the text never used are coded blindly; collect more text, or a greater variety of it"
    ]


def sharing_warnings(costs: Mapping[int, Sequence[float]]) -> list[str]:
    """Warn of layers that lose much by sharing one rotation between KV heads of different axes.

    Args:
        costs: Of each layer that shares its rotation, by KV head: key error over that under the head's own rotation.
    """
    means = {layer: sum(row) / len(row) for layer, row in costs.items()}
    layers = [layer for layer, mean in means.items() if mean > SHARED_COST]
    if not layers:
        return []
    worst = max(layers, key=lambda layer: means[layer])
    return [
        f"{_layers(layers)}: one rotation for all KV heads multiplies the key error, by {means[worst]:.1f} in layer "
        f"{worst}: use granularity=head"
    ]


def collapse_warnings(plan: Sequence[LayerPlan], layers: Sequence[LayerReport]) -> list[str]:
    """Name the layers whose attention is no longer the model's, mean KL above 1 nat, worst first, each with the reason.

    The reason is measured: an uncentred mean that outweighs the spread of the keys, else the RMS error of the logits,
    which multiplies softmax weights by its exponential.

    Args:
        plan: All layers of the artifact.
        layers: Its measurements at the longest context.
    """
    centred = {entry.layer: entry.k.absorbs_mean for entry in plan if entry.k is not None}
    broken = [row for row in layers if row.layer in centred and row.metrics.kl > COLLAPSE]
    if not broken:
        return []
    broken.sort(key=lambda row: -row.metrics.kl)
    reasons = []
    for row in broken[:NAMED]:
        rms = math.sqrt(row.metrics.qk_error)
        reason = f"logits off by {rms:.1f} RMS"
        if row.mean_ratio > MEAN_RATIO and not centred[row.layer]:
            reason += f", |mean key|^2 / variance {row.mean_ratio:.0f} and not centred"
        reasons.append(f"layer {row.layer} (KL {row.metrics.kl:.3g}: {reason})")
    more = f" and {len(broken) - NAMED} more" if len(broken) > NAMED else ""
    return [f"{len(broken)} of {len(centred)} coded layers collapse: {'; '.join(reasons)}{more}"]


def context_warnings(contexts: Sequence[int], target_context: int) -> list[str]:
    """Warn of contexts beyond the positions that the statistics were averaged for."""
    beyond = sorted(context for context in contexts if context > target_context)
    if not beyond:
        return []
    return [
        f"context {', '.join(map(str, beyond))} is beyond the {target_context} tokens that this fit was made for, "
        f"and keys at unseen positions are coded badly: fit with --target-context {beyond[-1]}"
    ]


def _layers(layers: Sequence[int]) -> str:
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, sorted(layers)))}"
