"""One quantized layer as transformers sees it: it takes new rows, and attention is computed where they are stored."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcq.codecs.pair import HeadCodec
from kvcq.errors import MismatchError, UnsupportedError
from kvcq.models.attention import AttentionCall
from kvcq.runtime.hf.reading import Reading
from kvcq.runtime.hf.rows import RequestRows, Shape
from kvcq.runtime.hf.slots import SlotReader, Slots
from kvcq.runtime.hf.ticket import Ticket
from kvcq.runtime.hf.turn import Turns
from kvcq.spec.geometry import LayerGeometry
from kvcq.spec.plan import Windows


@dataclass(frozen=True)
class LayerSetting:
    """What all requests of a layer have in common.

    Attributes:
        geometry: Heads and dims.
        codec: The layer's codec.
        windows: Exact tokens at both ends.
        rows: Makes the storage of one request.
        host: Who may ask for attention: the key that the model's attention function shows.
        attached: Tells whether the model's attention comes to kvcq.
        readers: Layers that read these rows in every forward, those that share them included.
    """

    geometry: LayerGeometry
    codec: HeadCodec
    windows: Windows
    rows: Callable[[HeadCodec, Windows, Shape], RequestRows]
    host: object
    attached: Callable[[], bool]
    readers: int = 1


class QuantizedLayer(CacheLayerMixin):
    """Cache of one layer for a batch of requests, each stored on its own.

    `update` takes the new rows and hands back a ticket, on which nothing but `attend` can compute. Padding is not
    stored: a request's rows, codes and windows are those it would have alone.

    Args:
        setting: What all requests have in common.
        reader: Reads masks; one for all layers of a cache.
        turns: Says what queries read exactly; one for all layers of a cache.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, setting: LayerSetting, reader: SlotReader, turns: Turns) -> None:
        super().__init__()
        self.setting, self.geometry, self.host = setting, setting.geometry, setting.host
        self.requests: list[RequestRows] = []
        self._reader, self._turns = reader, turns
        # Which of the library's slots hold a token of each request; padding does not. Replaced, never written into.
        self._real = torch.zeros(0, 0, dtype=torch.bool)
        self._pending: tuple[Tensor, Tensor] | None = None
        # Of the latest forward: its slots and what its queries read, until the last layer has read it.
        self._slots: Slots | None = None
        self._readings: list[Reading | None] = []
        self._reads = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}(layer={self.geometry.layer}, tokens={self.get_seq_length()})"

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedLayer:
        """Copy what is stored; model, codec and setting are shared."""
        reader = memo.setdefault(id(self._reader), SlotReader())
        twin = QuantizedLayer(self.setting, reader, copy.deepcopy(self._turns, memo))
        twin.requests = [copy.deepcopy(request, memo) for request in self.requests]
        twin._real, twin._pending, twin.is_initialized = self._real, self._pending, self.is_initialized
        return twin

    @property
    def interrupted(self) -> bool:
        """True when a forward ended between `update` and `attend`."""
        return self._pending is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the storage of each request of the batch.

        Raises:
            MismatchError: heads or head dims are not the artifact's.
            UnsupportedError: the model's layer lies elsewhere than the codec.
        """
        batch, heads, _, d_k = key_states.shape
        geometry, codec = self.geometry, self.setting.codec
        found = (heads, d_k, value_states.shape[-1])
        wanted = (geometry.kv_heads, geometry.d_k, geometry.d_v)
        if found != wanted:
            raise MismatchError(
                f"the model caches KV heads and head dims {found}, the artifact has {wanted}",
                where=f"layer {geometry.layer}",
            )
        dtype = codec.k.cast or (torch.float64 if key_states.dtype == torch.float64 else torch.float32)
        shape = Shape(*wanted, key_states.device, dtype)
        self.requests = [self.setting.rows(codec, self.setting.windows, shape) for _ in range(batch)]
        self._real = torch.zeros(batch, 0, dtype=torch.bool)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Take new rows ``[B, H, t, d]``, post-RoPE, and return the ticket for `attend`.

        Raises:
            UnsupportedError: the attention of the model does not come to kvcq, or did not in the forward before.
            MismatchError: rows of another shape than the artifact's.
        """
        where = f"layer {self.geometry.layer}"
        if self.interrupted:
            raise UnsupportedError(
                "an earlier forward ended before its rows were attended to", where=where, fix="reset the cache"
            )
        if not self.setting.attached():
            raise UnsupportedError(
                "the model's attention is not kvcq's: it was switched, or the cache was closed",
                where=where,
                fix="load the cache again, after the last call of set_attn_implementation",
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != len(self.requests):
            raise UnsupportedError(
                f"a batch of {key_states.shape[0]} for a cache of {len(self.requests)} requests",
                where=where,
                fix="use a new cache for another batch, or batch_repeat_interleave and batch_select_indices",
            )
        self._pending = (key_states, value_states)
        slots = self.get_seq_length() + key_states.shape[2]
        return Ticket.issue(self, key_states, slots), Ticket.issue(self, value_states, slots)

    def attend(self, call: AttentionCall) -> Tensor:
        """Store the rows of the last `update`, if this is the first call since, and attend over the cache.

        Args:
            call: The attention call; its key is the ticket, its query ``[B, Hq, t, d_k]``.

        Returns:
            Outputs ``[B, Hq, t, d_v]``; zeros where the query is padding.

        Raises:
            UnsupportedError: the call does not belong to the latest rows, or rows that it needs are gone.
        """
        where = f"layer {self.geometry.layer}"
        if self._pending is not None:
            keys, values = self._pending
            if call.query.shape[2] != keys.shape[2]:
                raise UnsupportedError(f"{call.query.shape[2]} queries for {keys.shape[2]} new rows", where=where)
            slots = self._reader.read(call, self._real)
            self._readings = [self._store(b, keys[b], values[b], slots) for b in range(len(self.requests))]
            self._real, self._slots, self._reads, self._pending = slots.real, slots, 0, None
        if self._slots is None or call.key.shape[2] != self._slots.real.shape[1]:
            raise UnsupportedError(f"layer {call.layer} reads rows that are not those of this forward", where=where)
        outputs = [self._read(call, b, self._slots) for b in range(len(self.requests))]
        self._reads += 1
        if self._reads == self.setting.readers:
            self._close()
        return outputs[0][None] if len(outputs) == 1 else torch.stack(outputs)

    def _store(self, row: int, keys: Tensor, values: Tensor, slots: Slots) -> Reading | None:
        """Append a request's rows and return what its queries read; None where all is padding."""
        request, fresh = self.requests[row], slots.fresh[row]
        if fresh is not None:
            keys, values = keys[:, fresh], values[:, fresh]
        if not keys.shape[1]:
            return None
        turn = self._turns.of(row, request.length, keys.shape[1])
        if turn.low < min(request.held, turn.first):
            raise UnsupportedError(
                f"the queries from position {turn.first} on need exact rows from position {turn.low} on, kept are "
                f"those from {request.held} on",
                where=f"layer {self.geometry.layer}",
                fix="cut the forwards where the chunks begin, or use mode simulate",
            )
        return request.take(keys, values, turn, causal=slots.visible[row] is None)

    def _read(self, call: AttentionCall, row: int, slots: Slots) -> Tensor:
        """Return the attention outputs ``[Hq, t, d_v]`` of one request."""
        reading, fresh = self._readings[row], slots.fresh[row]
        heads, count = call.query.shape[1], call.query.shape[2]
        if reading is None:
            return call.query.new_zeros(heads, count, self.geometry.d_v)
        query = call.query[row] if fresh is None else call.query[row][:, fresh]
        output = reading.attend(query, slots.visible[row], scaling=call.scaling, softcap=call.softcap, sinks=call.sinks)
        if fresh is None:
            return output
        padded = output.new_zeros(heads, count, self.geometry.d_v)
        padded[:, fresh] = output
        return padded

    def _close(self) -> None:
        """Let go of the latest forward: every layer has read."""
        for reading in self._readings:
            if reading is not None:
                reading.close()
        self._slots, self._readings = None, []

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
        self.requests, self._readings, self._slots, self._pending = [], [], None, None
        self._real = torch.zeros(0, 0, dtype=torch.bool)
        self.is_initialized = False

    def kept_slots(self, tokens_to_remove: int) -> int:
        """Return how many slots `crop` leaves, see there."""
        slots = self.get_seq_length()
        kept = slots + tokens_to_remove if tokens_to_remove <= 0 else tokens_to_remove
        return min(max(kept, 0), slots)

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuse what `crop` refuses, and change nothing.

        Raises:
            UnsupportedError: the exact rows that the shorter context needs are gone; names the number that can go.
        """
        kept = self.kept_slots(tokens_to_remove)
        for request, real in zip(self.requests, self._real, strict=True):
            request.check_crop(int(real[:kept].sum()))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` slots; a positive number is the length to keep (transformers 5.12).

        Raises:
            UnsupportedError: the exact rows that the shorter context needs are gone; nothing has changed then.
        """
        self.check_crop(tokens_to_remove)
        kept = self.kept_slots(tokens_to_remove)
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
        """Keep the requests at `indices` (or where a bool is True), in this order; one named again is copied."""
        if not self.is_initialized:
            return
        chosen = torch.arange(len(self.requests))[indices.cpu()]
        taken: set[int] = set()
        requests = []
        for index in chosen.tolist():
            requests.append(self.requests[index].clone() if index in taken else self.requests[index])
            taken.add(index)
        self.requests, self._real = requests, self._real[chosen]

    def offload(self) -> None:
        """Refuse: coded pages stay where they are.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "a quantized cache is not offloaded", where="offloading", fix="leave offloading off: the codes are small"
        )

    def prefetch(self) -> None:
        """Refuse, as `offload`.

        Raises:
            UnsupportedError: always.
        """
        self.offload()
