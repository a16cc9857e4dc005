"""The cache that a model is given: quantized layers where the plan says so, the library's own everywhere else."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from kvcq.codecs.pair import HeadCodec
from kvcq.errors import InputError, MismatchError, UnsupportedError
from kvcq.models.library import decoder_config, new_cache
from kvcq.runtime.hf.kernels import LayerKernels, choose_kernels, describe
from kvcq.runtime.hf.layer import LayerSetting, QuantizedLayer
from kvcq.runtime.hf.rows import PackedRows, RequestRows, Shape, SimulatedRows
from kvcq.runtime.hf.seam import Seam
from kvcq.runtime.hf.semantics import ByQuery, Semantics
from kvcq.runtime.hf.slots import SlotReader
from kvcq.runtime.hf.turn import Turns
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.plan import Windows

if TYPE_CHECKING:
    # Kernels need Triton, which is imported only where they are used.
    from kvcq.runtime.hf.desk import Desk

Mode = Literal["packed", "simulate"]
STORES: dict[str, type[RequestRows]] = {"packed": PackedRows, "simulate": SimulatedRows}


class QuantizedCache(Cache):
    """A transformers `Cache`, for ``model(...)`` and ``model.generate(past_key_values=...)``.

    Made by `Host.new_cache` or `load_cache`. It belongs to the model that it was made for; the model's attention
    function is kvcq's until the host is closed.

    Attributes:
        mode: ``packed``: the memory is what it seems; ``simulate``: fake quantization, larger than a BF16 cache.
        host: What made it.
    """

    def __init__(self, layers: list[CacheLayerMixin], mode: Mode, host: Host, desk: Desk | None = None) -> None:
        super().__init__(layers=layers)
        self.mode, self.host, self._desk = mode, host, desk
        self._first = min(number for number, layer in enumerate(layers) if isinstance(layer, QuantizedLayer))

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedCache:
        """Copy what is stored, as prompts that are used again need it; the copy belongs to the same host."""
        layers = [copy.deepcopy(layer, memo) for layer in self.layers]
        return QuantizedCache(layers, self.mode, self.host, copy.deepcopy(self._desk, memo))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new rows of one layer, see `QuantizedLayer.update`.

        Raises:
            UnsupportedError: an earlier forward ended before every layer had its rows.
        """
        if layer_idx == self._first:
            self._check_whole(key_states.shape[2])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _check_whole(self, count: int) -> None:
        """Compare the tokens of all layers when the first quantized one is about to take `count` more."""
        wanted = self.layers[self._first].get_seq_length()
        for number, layer in enumerate(self.layers):
            # Library layers before the first have taken the new rows; those of linear attention, and those that never
            # take any, do not count. A quantized one counts before it has any: the first forward may have ended.
            if isinstance(layer, QuantizedLayer) or (isinstance(layer, CacheLayerMixin) and layer.is_initialized):
                found = layer.get_seq_length() - (count if number < self._first else 0)
                if found != wanted:
                    raise UnsupportedError(
                        f"an earlier forward or crop did not reach every layer: layer {number} holds {found} tokens, "
                        f"layer {self._first} {wanted}",
                        where="cache",
                        fix="reset the cache, or use a new one",
                    )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget tokens at the end, in every layer or in none.

        Raises:
            UnsupportedError: exact rows that the shorter context needs are gone; names the number that can go.
        """
        for layer in self.quantized():
            layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each beam what the beam that it continues has stored."""
        on_host = beam_idx.cpu()
        for layer in self.layers:
            layer.reorder_cache(on_host if isinstance(layer, QuantizedLayer) else beam_idx)

    def quantized(self) -> list[QuantizedLayer]:
        """Return the quantized layers, in order."""
        return [layer for layer in self.layers if isinstance(layer, QuantizedLayer)]

    @property
    def kernels(self) -> str:
        """One line: how many layers are read by kernels, of which kind, and why the others are not."""
        return describe(self.host.kernels)

    def expect(self, tokens: int) -> None:
        """Say that no request will have more than `tokens` tokens: no pages are held ahead beyond them."""
        if self._desk is not None:
            self._desk.most = tokens

    def allocated_bytes(self) -> int:
        """Return the bytes of all tensors of the quantized layers, of all requests: what the layout says."""
        return sum(t.numel() * t.element_size() for layer in self.quantized() for t in layer.tensors())

    def ahead_bytes(self) -> int:
        """Return the bytes of pages held for tokens to come: none in torch, at most an eighth more with kernels."""
        return sum(request.ahead_bytes() for layer in self.quantized() for request in layer.requests)

    def clamped(self) -> int:
        """Return how many values beyond the float16 range were clamped since the requests began."""
        return sum(request.clamped for layer in self.quantized() for request in layer.requests)

    def close(self) -> None:
        """Close the host: the model's attention is its own again, and this cache can take no more rows."""
        self.host.close()

    def __enter__(self) -> QuantizedCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Host:
    """A model with codecs attached to it; makes caches.

    Args:
        model: The model; its attention function is kvcq's until `close`, or until the host is collected.
        codecs: Codecs by layer id; other layers keep the library's cache.
        geometry: The artifact's geometry.
        windows: Exact tokens at both ends.
        mode: What its caches store.
        kernels: None: kernels read packed caches where they can, on CUDA; False: torch does; True: kernels must, in
            Triton's interpreter too.

    Attributes:
        kernels: What computes attention, by layer id.

    Raises:
        MismatchError: codecs for layers that the model caches in another way.
        UnsupportedError: the model's attention cannot be observed, it is spread over devices, or the mode cannot hold
            the codecs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        codecs: Mapping[int, HeadCodec],
        geometry: ModelGeometry,
        windows: Windows,
        *,
        mode: Mode = "packed",
        kernels: bool | None = None,
    ) -> None:
        if not codecs:
            raise UnsupportedError("no layer is quantized", where="codecs", fix="use the library's own cache")
        if mode not in STORES:
            raise UnsupportedError(f"no mode {mode!r}", where="mode", fix=f"use {' or '.join(STORES)}")
        spread = set(getattr(model, "hf_device_map", {}).values())
        if len(spread) > 1:
            raise UnsupportedError(
                f"the model is spread over {len(spread)} devices, and codecs lie on one",
                where="device_map",
                fix="load it whole on one device",
            )
        if mode == "packed":
            for layer, codec in codecs.items():
                refuse_unpaged(layer, codec)
        self.model, self.codecs, self.windows, self.mode = model, dict(codecs), windows, mode
        self._geometry = {layer.layer: layer for layer in geometry.layers}
        self._shared = Counter(layer.source for layer in geometry.layers if layer.kind == "shared")
        self._check_layers()
        self.kernels = self._choose_kernels(kernels)
        self._seam = Seam.enter(model)
        self._close = weakref.finalize(self, self._seam.leave, model)

    def new_cache(self, semantics: Semantics | None = None) -> QuantizedCache:
        """Return an empty cache; `semantics` says what prefill queries read exactly, by the window rule if None.

        Raises:
            InputError: something else than semantics.
            UnsupportedError: the host is closed.
        """
        if not isinstance(semantics, Semantics | None):
            raise InputError(
                f"{semantics!r} is no semantics",
                where="semantics",
                fix="use ByQuery, Served or Deferred of kvcq.runtime.hf.semantics",
            )
        if not self._close.alive:
            raise UnsupportedError("the host is closed", where="new_cache", fix="attach the model again")
        layers, reader = self._library_layers(), SlotReader()
        turns = Turns(semantics or ByQuery(), self.windows)
        desk = self._desk()
        for number, codec in self.codecs.items():
            setting = LayerSetting(
                self._geometry[number],
                codec,
                self.windows,
                self._rows(number, desk),
                self._seam,
                self.active,
                readers=1 + self._shared[number],
            )
            layers[number] = QuantizedLayer(setting, reader, turns)
        return QuantizedCache(layers, self.mode, self, desk)

    def active(self) -> bool:
        """Return True while the model's attention comes to kvcq."""
        return self._close.alive and self._seam.active(self.model)

    def close(self) -> None:
        """Give the model its attention back; caches made here take no more rows."""
        self._close()

    def __enter__(self) -> Host:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _choose_kernels(self, wanted: bool | None) -> dict[int, LayerKernels]:
        if self.mode != "packed":
            return dict.fromkeys(self.codecs, LayerKernels("torch", f"mode {self.mode}"))
        first = next(self.model.parameters())
        return choose_kernels(self.codecs, self._geometry, first.device, self.model.dtype, wanted=wanted)

    def _desk(self) -> Desk | None:
        if all(layer.tables is None for layer in self.kernels.values()):
            return None
        from kvcq.runtime.hf.desk import Desk

        return Desk(self.windows, next(self.model.parameters()).device)

    def _rows(self, number: int, desk: Desk | None) -> Callable[[HeadCodec, Windows, Shape], RequestRows]:
        tables = self.kernels[number].tables
        if tables is None or desk is None:
            return STORES[self.mode]
        from kvcq.runtime.hf.kernel_rows import KernelRows

        return partial(KernelRows, tables=tables, desk=desk)

    def _library_layers(self) -> list[CacheLayerMixin]:
        cache = new_cache(self.model)
        if type(cache) is not DynamicCache:
            raise UnsupportedError(
                f"the model takes no other cache than its own {type(cache).__name__}",
                where=f"model_type {self.model.config.model_type}",
            )
        layers = list(cache.layers)
        # Without layer types in its configuration the library makes layers as they come.
        missing = decoder_config(self.model).num_hidden_layers - len(layers)
        return layers + [DynamicLayer() for _ in range(missing)]

    def _check_layers(self) -> None:
        layers = self._library_layers()
        for number in self.codecs:
            where = f"layer {number}"
            if number >= len(layers) or number not in self._geometry:
                raise MismatchError("the model does not have this layer", where=where)
            if type(layers[number]) is not DynamicLayer:
                raise MismatchError(
                    f"the library caches it as {type(layers[number]).__name__}, which holds more than keys and values",
                    where=where,
                    fix="keep the layer in BF16 with skip_layers",
                )


def refuse_unpaged(layer: int, codec: HeadCodec) -> None:
    """Refuse a codec that uniform 2-bit pages cannot hold.

    Raises:
        UnsupportedError: names the layer.
    """
    for name, side in (("keys", codec.k), ("values", codec.v)):
        if reason := side.spec.unserved:
            raise UnsupportedError(
                f"the codec of the {name} is for accuracy only: pages do not hold it ({reason})",
                where=f"mode packed, layer {layer}",
                fix="use mode simulate",
            )
