"""Which layers of a model the kernels serve, and why the others are left to torch: decided once, and told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from kvcq.codecs.pair import HeadCodec
from kvcq.errors import UnsupportedError
from kvcq.kernels.arrays import Tables
from kvcq.kernels.limits import device_limits
from kvcq.kernels.select import choose
from kvcq.spec.geometry import LayerGeometry

DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LayerKernels:
    """What computes the attention of one layer.

    Attributes:
        backend: ``cuda``, ``triton`` or ``torch``.
        reason: Why.
        tables: The codec as kernels take it; None: torch.
        writer: What codes its rows, see `kernels.write.writers`; "": torch.
    """

    backend: str
    reason: str
    tables: Tables | None = None
    writer: str = ""


def choose_kernels(
    codecs: Mapping[int, HeadCodec],
    geometry: Mapping[int, LayerGeometry],
    device: torch.device,
    dtype: torch.dtype,
    *,
    wanted: bool | None,
) -> dict[int, LayerKernels]:
    """Decide for every quantized layer.

    Args:
        codecs: Codecs by layer id, on the device.
        geometry: Layers by id.
        device: Where the model is.
        dtype: Of the model.
        wanted: None: kernels where they can be used; False: nowhere; True: everywhere, in Triton's interpreter too.

    Raises:
        UnsupportedError: `wanted`, and a layer has none.
    """
    if wanted is False:
        return dict.fromkeys(codecs, LayerKernels("torch", "kernels are switched off"))
    if wanted is None and (reason := _unfit(device, dtype)):
        return dict.fromkeys(codecs, LayerKernels("torch", reason))
    chosen = {number: _choose(codec, geometry[number], device, dtype) for number, codec in codecs.items()}
    for number, layer in chosen.items():
        if wanted and layer.tables is None:
            raise UnsupportedError(f"no kernels: {layer.reason}", where=f"layer {number}", fix="leave the choice open")
    return chosen


def describe(chosen: Mapping[int, LayerKernels]) -> str:
    """Return one line: how many layers run on what, why, and what writes them where that is something else."""
    kinds = Counter((layer.backend, layer.reason, layer.writer) for layer in chosen.values())
    return "; ".join(
        f"{backend} for {count} {'layer' if count == 1 else 'layers'} ({reason})"
        + ("" if writer in ("", backend) else f", written by {writer}")
        for (backend, reason, writer), count in kinds.items()
    )


def _unfit(device: torch.device, dtype: torch.dtype) -> str | None:
    """Say why no layer of a model has kernels, or None."""
    if device.type != "cuda":
        return f"the model is on {device.type}"
    if dtype not in DTYPES:
        return f"the model is in {str(dtype).removeprefix('torch.')}, kernels take bfloat16 and float16"
    if find_spec("triton") is None:
        return "triton is not installed"
    return None


def _choose(codec: HeadCodec, layer: LayerGeometry, device: torch.device, dtype: torch.dtype) -> LayerKernels:
    try:
        tables = Tables.of(codec, layer.kv_heads, layer.d_k, layer.d_v, dtype, device)
    except UnsupportedError as error:
        return LayerKernels("torch", str(error))
    if not _same_words(tables, codec):
        return LayerKernels("torch", "a codebook is not in steps of 1/127 of its largest coordinate")
    limits = device_limits(device)
    choice = choose(
        limits.capability,
        tables,
        layer.q_heads // layer.kv_heads,
        dtype=str(dtype).removeprefix("torch."),
        limits=limits,
    )
    if choice.backend == "torch":
        return LayerKernels("torch", choice.reason)
    # With Triton, which may not be installed.
    from kvcq.kernels.write import writers

    return LayerKernels(choice.backend, choice.reason, tables, writers(tables, dtype, device))


def _same_words(tables: Tables, codec: HeadCodec) -> bool:
    """Tell whether the coordinates that kernels look up are the words of the codec, or there are none."""
    if tables.codebook is None or tables.codebook_scale is None or codec.k.words is None:
        return True
    words = codec.k.words
    held = tables.codebook[..., None].view(torch.int8)[:, :, : words.shape[2]]
    return torch.equal(held.float() * tables.codebook_scale[..., None, None], words)
