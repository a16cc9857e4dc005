"""Prompts that begin: which layers a library attends to them in, and which requests of a batch they are.

A request without a history, or the first chunk of one, reads nothing but exact rows of its own, so any causal attention
will do (`kvcq.kernels.causal`). Each is attended to by itself, so that it comes out alike whatever is beside it. All
other requests of the batch stay with the kernel that reads pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from kvcq.kernels.arrays import Requests, Tables
from kvcq.kernels.causal import prepare
from kvcq.runtime.sglang.session import ExtendStep
from kvcq.spec.geometry import LayerGeometry


@dataclass(frozen=True)
class Begins:
    """Which requests of an extend a library attends to, and what is left for the kernel.

    Attributes:
        spans: Where the tokens of each of them begin and end.
        rest: The other requests, by themselves; None where there are none.
        tokens: int64, which tokens of the extend those of `rest` are.
    """

    spans: tuple[tuple[int, int], ...]
    rest: ExtendStep | None
    tokens: Tensor


def prepare_layers(
    layers: Iterable[LayerGeometry], tables: Mapping[int, Tables], q_heads: int, device: torch.device, longest: int
) -> frozenset[int]:
    """Have the library get ready, in this thread; return the layers whose prompts that begin it attends to.

    Args:
        layers: Of the model; those that `tables` lacks are another rank's.
        tables: By layer id.
        q_heads: Of this rank.
        device: Where it attends.
        longest: Tokens of the longest prompt, or of a chunk.
    """
    ready = cache(prepare)
    return frozenset(
        layer.layer
        for layer in layers
        if (own := tables.get(layer.layer)) is not None
        # What only scales products: the library knows nothing else.
        and layer.softcap is None
        and layer.window is None
        and not layer.sinks
        and ready((q_heads, own.heads), (own.k.d, own.v.d), own.k.map.dtype, device, longest)
    )


def find_begins(step: ExtendStep, firsts: Sequence[int], counts: Sequence[int], least: int) -> Begins | None:
    """Take the requests without a history and of `least` tokens or more out of an extend; None where none is.

    Args:
        step: Of all.
        firsts: Tokens that each request has before.
        counts: New tokens of each.
        least: Of these.
    """
    ends = list(accumulate(counts))
    alone = [not first and count >= least for first, count in zip(firsts, counts, strict=True)]
    if not any(alone) or ends[-1] > step.tokens:
        return None
    spans = [(end - count, end) for end, count in zip(ends, counts, strict=True)]
    taken = tuple(span for span, own in zip(spans, alone, strict=True) if own)
    left = [index for index, own in enumerate(alone) if not own]
    device = step.slots.device
    if not left:
        return Begins(taken, None, torch.zeros(0, dtype=torch.int64, device=device))
    kept = [counts[index] for index in left]
    chosen = _sent(torch.tensor(left), device)
    tokens = _sent(torch.cat([torch.arange(*spans[index]) for index in left]), device)
    whole = step.batch
    batch = Requests(
        whole.page_table.index_select(0, chosen),
        whole.slots.index_select(0, chosen),
        whole.lengths.index_select(0, chosen),
        whole.exact_from.index_select(0, chosen),
    )
    rest = ExtendStep(
        batch,
        slots=step.slots.index_select(0, tokens),
        positions=step.positions.index_select(0, tokens),
        requests=_sent(torch.arange(len(left), dtype=torch.int32).repeat_interleave(torch.tensor(kept)), device),
        starts=_sent(torch.tensor([0, *accumulate(kept)], dtype=torch.int32), device),
        oldest=step.oldest.index_select(0, tokens),
    )
    return Begins(taken, rest, tokens)


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it: it may still be at work on the forward before."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
