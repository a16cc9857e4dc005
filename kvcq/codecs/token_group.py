"""Keys by channel: the tokens of a group share one {scale, bias} for each channel (KIVI), some channels more bits.

Group k holds the positions [S + k G, S + (k + 1) G), S the end of the sink: groups do not depend on when a row is
coded. A group is coded from its own exact rows once it is complete. With recent >= G that is always so: the key at
position j is read coded by queries i >= j + recent, and its group ends at j + G - 1 at the latest, before i. fit
therefore refuses such a codec with a shorter window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcq.codecs.uniform import decode_uniform, encode_uniform
from kvcq.spec.codec import CodecSpec


def group_begin(position: int, spec: CodecSpec) -> int:
    """Return the first position of the group that holds `position`; a sink position is alone."""
    return position - max(position - spec.group_start, 0) % spec.group_tokens


def group_end(position: int, spec: CodecSpec) -> int:
    """Return the smallest border of a group at or after `position`; a sink position is one itself."""
    return position + -max(position - spec.group_start, 0) % spec.group_tokens


def token_group_hat(rows: Tensor, first: int, spec: CodecSpec) -> Tensor:
    """Return what is read back of rows [H, T, d] float32 at positions first, first + 1, ...; same shape, float32.

    Sink rows come back as they are. A last group without all its rows is coded from those it has: nobody reads it yet.

    Raises:
        ValueError: `first` lies inside a group.
    """
    size = spec.group_tokens
    sinks = min(max(spec.group_start - first, 0), rows.shape[1])
    if sinks:
        return torch.cat([rows[:, :sinks], token_group_hat(rows[:, sinks:], first + sinks, spec)], 1)
    if group_begin(first, spec) != first:
        raise ValueError(f"rows start at position {first}, inside a group of {size} tokens")
    heads, tokens, d = rows.shape
    whole = tokens - tokens % size
    groups = rows[:, :whole].reshape(heads, -1, size, d)
    parts = [_group_hat(groups, spec).reshape(heads, whole, d)]
    if whole < tokens:
        parts.append(_group_hat(rows[:, None, whole:], spec).squeeze(1))
    return torch.cat(parts, 1)


def _group_hat(groups: Tensor, spec: CodecSpec) -> Tensor:
    """Return what is read back of groups [H, n, G, d], one {scale, bias} for each group and channel."""
    channels = groups.mT.contiguous()
    decoded = _coded(channels, spec.bits, spec)
    count = spec.promoted_channels(groups.shape[-1])
    if count:
        index = promoted(groups, count)[..., None].expand(*groups.shape[:2], count, groups.shape[2])
        fine = _coded(channels.gather(2, index), 2 * spec.bits, spec)
        decoded = decoded.scatter(2, index, fine)
    return decoded.mT


def promoted(groups: Tensor, count: int) -> Tensor:
    """Return the `count` channels of largest mean magnitude in each group [H, n, G, d], int64 [H, n, count].

    Of equal means the lower channel comes first.
    """
    means = groups.double().abs().mean(2)
    return means.sort(stable=True, dim=-1, descending=True).indices[..., :count]


def _coded(channels: Tensor, bits: int, spec: CodecSpec) -> Tensor:
    codes, scale, bias, _ = encode_uniform(channels, 1, bits, spec.metadata)
    return decode_uniform(codes, scale, bias, spec.metadata)
