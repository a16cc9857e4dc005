"""The exact rows beside the pages: sinks and rings of every row of SGLang's request table, and sinks kept for reuse.

All layers of a kind lie in one tensor, requests first, kept sinks behind them::

    sink_k [layers][rows | entries][H][S][d_k]     rows: one a running request, its number is ``req_pool_idx``
    ring_k [layers][rows          ][H][R][d_k]     position p at ``p mod R``

A request reads and writes the sinks of its own row only; a prefix hit copies a kept entry into that row, and the row
of a request that computed its sinks is copied into an entry. Why requests do not point at shared entries: SGLang frees
a row while the last forward of its request may still run, and its scheduler goes on as soon as that forward has copied
its inputs. What such a forward writes lands in the row, which its next owner fills later on the same stream; through a
pointer that is changed meanwhile it could land in an entry that others read. Kernels also keep their one index for
sinks and rings. A copy moves ``2 H S (d_k + d_v)`` bytes a layer, 9 MB for 36 layers, 8 heads and d = 128: a few
microseconds of an H200 for each prefix hit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcq.kernels.arrays import LayerCache
from kvcq.runtime.layout import RING_SLACK
from kvcq.runtime.sglang.store import Moves
from kvcq.spec.plan import Windows


@dataclass(frozen=True)
class WindowBuffers:
    """Exact rows of all layers, and since where each request has them.

    Attributes:
        sink_k, sink_v: ``[layers, rows + entries, H, S, d]``, served dtype, in the frame of the codes.
        ring_k, ring_v: ``[layers, rows, H, W + 64, d]``, likewise.
        exact_from: int32 ``[rows]``: before this position a request has no exact row, sinks apart. SGLang's padding
            row 0 keeps 0.
        windows: S and W.
    """

    sink_k: Tensor
    sink_v: Tensor
    ring_k: Tensor
    ring_v: Tensor
    exact_from: Tensor
    windows: Windows

    @classmethod
    def reserve(
        cls,
        *,
        layers: int,
        rows: int,
        entries: int,
        heads: int,
        dims: tuple[int, int],
        windows: Windows,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> WindowBuffers:
        """Allocate.

        Args:
            layers: Quantized layers.
            rows: Rows of the request table, its padding row included.
            entries: Sinks kept for later requests.
            heads: KV heads H on this device.
            dims: d_k and d_v.
            windows: S and W.
            dtype: Served dtype.
            device: Where the pages are.

        Raises:
            ValueError: sizes out of range, with the numbers.
        """
        if layers < 1 or rows < 2 or entries < 0 or heads < 1:
            raise ValueError(f"{layers} layers, {rows} rows, {entries} entries and {heads} heads hold no request")
        ring = windows.recent + RING_SLACK
        # Zeros, not garbage: rows that are masked out are loaded all the same, and 0 times NaN is NaN.
        sink_k, sink_v, ring_k, ring_v = (
            torch.zeros(layers, count, heads, kept, d, dtype=dtype, device=device)
            for count, kept in ((rows + entries, windows.sink), (rows, ring))
            for d in dims
        )
        since = torch.zeros(rows, dtype=torch.int32, device=device)
        return cls(sink_k, sink_v, ring_k, ring_v, since, windows)

    @property
    def rows(self) -> int:
        """Rows of the request table, its padding row included."""
        return self.exact_from.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        tensors = (self.sink_k, self.sink_v, self.ring_k, self.ring_v, self.exact_from)
        return sum(tensor.nbytes for tensor in tensors)

    def cache(self, layer: int, pages: Tensor) -> LayerCache:
        """Return one layer as kernels take it, views of the buffers: `Requests.slots` are ``req_pool_idx``.

        Args:
            layer: Index among the layers here, not the model's layer id.
            pages: Page blocks uint8 ``[pages, H, block bytes]`` of that layer.
        """
        rows = self.rows
        return LayerCache(
            pages=pages,
            sink_k=self.sink_k[layer, :rows],
            sink_v=self.sink_v[layer, :rows],
            ring_k=self.ring_k[layer],
            ring_v=self.ring_v[layer],
            windows=self.windows,
        )

    def apply(self, moves: Moves) -> None:
        """Do what the store decided, on the current stream: sinks into entries, entries into rows, then `exact_from`.

        To be called on the stream of the forwards, before the extend that the moves belong to. Does not wait for the
        device.
        """
        rows = self.rows
        for row, entry in moves.keep:
            self._copy(row, rows + entry)
        for entry, row in moves.restore:
            self._copy(rows + entry, row)
        if moves.exact_from:
            pinned = self.exact_from.is_cuda
            table = torch.tensor(moves.exact_from, dtype=torch.int32, pin_memory=pinned)
            table = table.to(self.exact_from.device, non_blocking=True)
            self.exact_from.index_copy_(0, table[:, 0].long(), table[:, 1])

    def _copy(self, source: int, target: int) -> None:
        for sinks in (self.sink_k, self.sink_v):
            sinks[:, target].copy_(sinks[:, source])
