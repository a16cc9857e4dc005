"""BF16 attention by the libraries that are there, each over memory of its own; the best of them is "BF16"."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvcq.pipeline.bench.layers import SERVED
from kvcq.pipeline.bench.shapes import Shape, layers_for
from kvcq.pipeline.bench.timing import Call, Timing, free, time_calls
from kvcq.runtime.layout import PAGE

WORKSPACE = 256 << 20
DEVICE = "cuda"
FLASH = "flash"


@dataclass(frozen=True)
class Baseline:
    """One library: its time, or why there is none."""

    name: str
    timing: Timing | None
    problem: str | None = None


def baselines(shape: Shape, repeats: int) -> list[Baseline]:
    """Time BF16 attention of a decode step, or of a causal chunk behind its prefix."""
    found = []
    for name, prepare in (_prefill(shape) if shape.chunk > 1 else _decode(shape)).items():
        try:
            found.append(Baseline(name, time_calls(list(prepare()), repeats)))
        # Libraries refuse shapes in many ways, and one that cannot is no reason to measure nothing.
        except Exception as error:
            found.append(Baseline(name, None, f"{type(error).__name__}: {error}".splitlines()[0]))
        free()
    return found


def best(found: list[Baseline]) -> Baseline | None:
    """Return the fastest one, or None."""
    timed = [(one.timing.us, one) for one in found if one.timing is not None]
    return min(timed, key=lambda pair: pair[0])[1] if timed else None


def _decode(shape: Shape) -> dict[str, Callable[[], Iterator[Call]]]:
    forms = {
        "SDPA flash": lambda: _sdpa(shape, SDPBackend.FLASH_ATTENTION, as_rows=True),
        "SDPA cuDNN": lambda: _sdpa(shape, SDPBackend.CUDNN_ATTENTION, as_rows=True),
        "SDPA cuDNN, grouped": lambda: _sdpa(shape, SDPBackend.CUDNN_ATTENTION, as_rows=False),
    }
    if _has_flashinfer():
        forms["FlashInfer"] = lambda: _flashinfer(shape)
    return forms


def _prefill(shape: Shape) -> dict[str, Callable[[], Iterator[Call]]]:
    forms = {FLASH: lambda: _flash_chunk(shape)}
    if shape.chunk == shape.context:
        # Behind a prefix its causal mask begins at the first key instead of ending at the last one, and
        # `causal_lower_right` of torch has flash, the memory-efficient kernel or a mask in memory, never cuDNN.
        forms["SDPA cuDNN"] = lambda: _cudnn_causal(shape)
    if _has_flashinfer():
        forms["FlashInfer, ragged"] = lambda: _flashinfer_ragged(shape)
        forms["FlashInfer, paged"] = lambda: _flashinfer_paged(shape)
    return forms


def _has_flashinfer() -> bool:
    return find_spec("flashinfer") is not None


def _layers(shape: Shape) -> int:
    return layers_for(shape.bf16_bytes)


def _random(*size: int) -> Tensor:
    return torch.randn(size, dtype=SERVED, device=DEVICE)


def _sdpa(shape: Shape, backend: SDPBackend, *, as_rows: bool) -> Iterator[Call]:
    """Yield calls of one token a request; `as_rows` makes the query heads of a KV head rows of one query."""
    rows = (shape.heads, shape.group) if as_rows else (shape.q_heads, 1)
    for _ in range(_layers(shape)):
        k, v = (_random(shape.batch, shape.heads, shape.context, shape.d) for _ in range(2))
        q = _random(shape.batch, *rows, shape.d)

        def call(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, enable_gqa=not as_rows)

        yield call


def _flashinfer(shape: Shape) -> Iterator[Call]:
    """Yield calls over pages of 64 tokens in random order."""
    wrapper = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(_workspace(), "HND", use_tensor_cores=True)
    wrapper.plan(*_pages(shape), *_heads(shape), PAGE, q_data_type=SERVED, kv_data_type=SERVED)
    for _ in range(_layers(shape)):
        cache = _random(shape.pages, 2, shape.heads, PAGE, shape.d)
        q = _random(shape.batch, shape.q_heads, shape.d)
        yield partial(wrapper.run, q, cache, out=torch.empty_like(q))


def _flashinfer_ragged(shape: Shape) -> Iterator[Call]:
    """Yield causal calls aligned to the last key, over keys and values one after the other."""
    wrapper = import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper(_workspace(), "NHD")
    ends = (_starts(shape.batch, shape.chunk), _starts(shape.batch, shape.context))
    wrapper.plan(*ends, *_heads(shape), causal=True, q_data_type=SERVED, kv_data_type=SERVED)
    for _ in range(_layers(shape)):
        k, v = (_random(shape.batch * shape.context, shape.heads, shape.d) for _ in range(2))
        q = _random(shape.batch * shape.chunk, shape.q_heads, shape.d)
        yield partial(wrapper.run, q, k, v, out=torch.empty_like(q))


def _flashinfer_paged(shape: Shape) -> Iterator[Call]:
    """Yield the same calls over pages of 64 tokens in random order."""
    wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(_workspace(), "HND")
    places = (_starts(shape.batch, shape.chunk), *_pages(shape))
    wrapper.plan(*places, *_heads(shape), PAGE, causal=True, q_data_type=SERVED, kv_data_type=SERVED)
    for _ in range(_layers(shape)):
        cache = _random(shape.pages, 2, shape.heads, PAGE, shape.d)
        q = _random(shape.batch * shape.chunk, shape.q_heads, shape.d)
        yield partial(wrapper.run, q, cache, out=torch.empty_like(q))


def _workspace() -> Tensor:
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=DEVICE)


def _starts(batch: int, length: int) -> Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * length


def _pages(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Return where the pages of each request begin, all of them, and the tokens in its last one."""
    indices = torch.randperm(shape.pages, dtype=torch.int32, device=DEVICE)
    last = torch.full((shape.batch,), (shape.context - 1) % PAGE + 1, dtype=torch.int32, device=DEVICE)
    return _starts(shape.batch, shape.pages // shape.batch), indices, last


def _heads(shape: Shape) -> tuple[int, int, int]:
    return shape.q_heads, shape.heads, shape.d


def _flash_chunk(shape: Shape) -> Iterator[Call]:
    """Yield causal calls aligned to the last key, as the flash kernels of torch do it."""
    scale = 1 / math.sqrt(shape.d)
    for _ in range(_layers(shape)):
        k, v = (_random(shape.batch, shape.context, shape.heads, shape.d) for _ in range(2))
        q = _random(shape.batch, shape.chunk, shape.q_heads, shape.d)

        def call(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            lengths = (shape.chunk, shape.context)
            # The public function would align the mask to the first key.
            out: Tensor = torch.ops.aten._flash_attention_forward(
                q, k, v, None, None, *lengths, 0.0, True, False, scale=scale
            )[0]
            return out

        yield call


def _cudnn_causal(shape: Shape) -> Iterator[Call]:
    for _ in range(_layers(shape)):
        k, v = (_random(shape.batch, shape.heads, shape.context, shape.d) for _ in range(2))
        q = _random(shape.batch, shape.q_heads, shape.chunk, shape.d)

        def call(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        yield call
