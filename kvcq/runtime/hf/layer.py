"""One quantized layer as transformers sees it: it takes new rows, and attention is computed where they are stored."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcq.codecs.attend import Tier, attend
from kvcq.codecs.pair import HeadCodec
from kvcq.errors import MismatchError, UnsupportedError
from kvcq.models.attention import AttentionCall
from kvcq.runtime.hf.rows import RequestRows, Shape
from kvcq.runtime.hf.semantics import Semantics
from kvcq.spec.geometry import LayerGeometry
from kvcq.spec.plan import Windows

TICKET = "kvcq_layer"


class QuantizedLayer(CacheLayerMixin):
    """Cache of one layer for a batch of requests, each stored on its own.

    `update` takes the new rows and hands back a ticket: tensors of the library's shape that hold no data, NaN wherever
    they are read, so that attention which does not come back to `attend` can never pass for a result. Padding is not
    stored: a request's rows, codes and windows are those it would have alone.

    Args:
        geometry: Heads and dims.
        codec: The layer's codec.
        windows: Exact tokens at both ends.
        semantics: What prefill queries read exactly.
        rows: Makes the storage of one request.
        attached: Tells whether the model's attention comes to kvcq.
        shared: Other layers read this one's rows after it.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(
        self,
        geometry: LayerGeometry,
        codec: HeadCodec,
        windows: Windows,
        semantics: Semantics,
        rows: Callable[[HeadCodec, Windows, Shape], RequestRows],
        attached: Callable[[], bool],
        shared: bool = False,
    ) -> None:
        super().__init__()
        self.geometry, self.codec, self.windows, self.semantics = geometry, codec, windows, semantics
        self._make_rows, self._attached, self._shared = rows, attached, shared
        self.requests: list[RequestRows] = []
        # Which of the library's slots hold a token of each request; padding does not.
        self._real = torch.zeros(0, 0, dtype=torch.bool)
        self._pending: tuple[Tensor, Tensor] | None = None
        self._latest: list[list[Tier]] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}(layer={self.geometry.layer}, tokens={self.get_seq_length()})"

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the storage of each request of the batch."""
        batch, heads, _, d_k = key_states.shape
        geometry = self.geometry
        found = (heads, d_k, value_states.shape[-1])
        wanted = (geometry.kv_heads, geometry.d_k, geometry.d_v)
        if found != wanted:
            raise MismatchError(
                f"the model caches KV heads and head dims {found}, the artifact has {wanted}",
                where=f"layer {geometry.layer}",
            )
        dtype = self.codec.k.cast or (torch.float64 if key_states.dtype == torch.float64 else torch.float32)
        self.device = key_states.device
        shape = Shape(*wanted, self.device, dtype)
        self.requests = [self._make_rows(self.codec, self.windows, shape) for _ in range(batch)]
        self._real = torch.zeros(batch, 0, dtype=torch.bool)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Take new rows ``[B, H, t, d]``, post-RoPE, and return the ticket for `attend`.

        Raises:
            UnsupportedError: the attention of the model does not come to kvcq, or did not in the forward before.
        """
        where = f"layer {self.geometry.layer}"
        if self._pending is not None:
            raise UnsupportedError("the rows of a forward were never attended to", where=where, fix="use a new cache")
        if not self._attached():
            raise UnsupportedError(
                "the model's attention is not kvcq's: it was switched, or the cache was closed",
                where=where,
                fix="load the cache again, after the last call of set_attn_implementation",
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != len(self.requests):
            raise UnsupportedError(
                f"a batch of {key_states.shape[0]} for a cache of {len(self.requests)} requests", where=where
            )
        self._pending = (key_states, value_states)
        slots = self.get_seq_length() + key_states.shape[2]
        return self._ticket(key_states, slots), self._ticket(value_states, slots)

    def attend(self, call: AttentionCall) -> Tensor:
        """Store the rows of the last `update`, if this is the first call since, and attend over the cache.

        Args:
            call: The attention call; its key is the ticket, its query ``[B, Hq, t, d_k]``.

        Returns:
            Outputs ``[B, Hq, t, d_v]``; zeros where the query is padding.
        """
        queries = call.query.shape[2]
        if self._pending is not None:
            keys, values = self._pending
            fresh = _fresh(call, queries)
            self._real = torch.cat([self._real, fresh.cpu()], 1)
            self._pending = None
            self._latest = [
                self._store(request, keys[b], values[b], fresh[b]) for b, request in enumerate(self.requests)
            ]
        outputs = []
        for b, request in enumerate(self.requests):
            real = self._real[b]
            own = real[-queries:].to(call.query.device)
            query = call.query[b] if bool(own.all()) else call.query[b][:, own]
            output = call.query.new_zeros(call.query.shape[1], queries, self.geometry.d_v)
            if query.shape[1]:
                read = self._read(call, request, self._latest[b], query, _visible(call, b, real))
                output[:, own] = read.to(output.dtype)
            outputs.append(output)
        if not self._shared:
            self._latest = []
        return torch.stack(outputs)

    def _store(self, request: RequestRows, keys: Tensor, values: Tensor, fresh: Tensor) -> list[Tier]:
        """Append a request's rows and return the tiers that its queries read."""
        if not bool(fresh.all()):
            keys, values = keys[:, fresh], values[:, fresh]
        first, count = request.length, keys.shape[1]
        if not count:
            return []
        sink = self.windows.sink
        oldest = self.semantics.oldest(first, count, self.windows)
        low, high = max(int(oldest.min()), sink), int(oldest.max())
        if low < min(request.held, first):
            raise UnsupportedError(
                f"the queries from position {first} on need exact rows from position {low} on, kept are those from "
                f"{request.held} on",
                where=f"layer {self.geometry.layer}",
                fix="cut the forwards where the chunks begin, or use mode simulate",
            )
        frame = self.codec.key_frame(keys), self.codec.value_frame(values)
        before = min(low, first)
        # Read before `append`, which may overwrite the ring.
        k_old, v_old = request.exact(before, first) if before < first else (frame[0][:, :0], frame[1][:, :0])
        recent = torch.cat([k_old.to(frame[0].dtype), frame[0]], 1), torch.cat([v_old.to(frame[1].dtype), frame[1]], 1)
        request.append(*frame)
        stop = request.length
        tiers = [Tier("recent", before, *recent)]
        if low > before:
            tiers = [tiers[0].cut(low, stop)]
        if sink and stop:
            tiers.append(Tier("sink", 0, *request.exact(0, min(sink, stop))))
        if sink < min(high, stop):
            tiers.append(Tier("coded", sink, *request.decoded(sink, min(high, stop))))
        return tiers

    def _read(
        self, call: AttentionCall, request: RequestRows, tiers: list[Tier], query: Tensor, visible: Tensor | None
    ) -> Tensor:
        count = query.shape[1]
        first = request.length - count
        return attend(
            self.codec,
            query,
            tiers,
            self.semantics.oldest(first, count, self.windows),
            first=first,
            visible=visible,
            scaling=call.scaling,
            softcap=call.softcap,
            sinks=call.sinks,
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many slots the mask covers after `query_length` more, and the first of them."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the library's slots, padding included."""
        return self._real.shape[1]

    def get_max_length(self) -> int:
        """Return -1: the cache grows."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1: the name of `get_max_length` up to transformers 5.12."""
        return -1

    def tensors(self) -> list[Tensor]:
        """Return every tensor that the requests occupy."""
        return [tensor for request in self.requests for tensor in request.tensors()]

    def reset(self) -> None:
        """Forget all requests."""
        self.requests, self._latest, self._pending = [], [], None
        self._real = torch.zeros(0, 0, dtype=torch.bool)
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` slots; a positive number is the length to keep (transformers 5.12).

        Raises:
            UnsupportedError: the exact rows that the shorter context needs are gone.
        """
        slots = self.get_seq_length()
        kept = slots + tokens_to_remove if tokens_to_remove <= 0 else tokens_to_remove
        if kept >= slots:
            return
        kept = max(kept, 0)
        for request, real in zip(self.requests, self._real, strict=True):
            request.crop(int(real[:kept].sum()))
        self._real = self._real[:, :kept]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each request."""
        self.batch_select_indices(torch.arange(len(self.requests)).repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each beam the request of the beam that it continues."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the requests at `indices`, in this order; one that is named again is copied."""
        chosen = torch.arange(len(self.requests))[indices.cpu()].tolist()
        taken: set[int] = set()
        requests = []
        for index in chosen:
            requests.append(self.requests[index].clone() if index in taken else self.requests[index])
            taken.add(index)
        self.requests = requests
        if self.is_initialized:
            self._real = self._real[torch.tensor(chosen, dtype=torch.long)]

    def offload(self) -> None:
        """Refuse: coded pages stay where they are.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "a quantized cache is not offloaded", where="offloading", fix="leave offloading off: the codes are small"
        )

    def _ticket(self, rows: Tensor, slots: int) -> Tensor:
        ticket = rows.new_full((1,), torch.nan).expand(*rows.shape[:2], slots, rows.shape[3])
        setattr(ticket, TICKET, self)
        return ticket


def holder(key: Tensor) -> QuantizedLayer | None:
    """Return the layer that issued a key tensor as a ticket, or None for keys with data."""
    return getattr(key, TICKET, None)


def _fresh(call: AttentionCall, count: int) -> Tensor:
    """Return which of the last `count` slots hold a token, bool ``[B, count]``: what no query sees is padding."""
    batch = call.query.shape[0]
    if call.mask is None:
        return torch.ones(batch, count, dtype=torch.bool, device=call.query.device)
    return call.visible()[:, 0, :, -count:].any(1).expand(batch, -1)


def _visible(call: AttentionCall, row: int, real: Tensor) -> Tensor | None:
    """Return what the library's mask lets the queries of a request see of its tokens, None for everything causal."""
    if call.mask is None:
        return None
    mask = call.visible()
    visible = mask[row if mask.shape[0] > 1 else 0, 0]
    if bool(real.all()):
        return visible
    real = real.to(visible.device)
    return visible[real[-visible.shape[0] :]][:, real]
