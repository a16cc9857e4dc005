"""What the kernels read and write, as tensors on one device.

Rows are token-major here, ``[tokens, heads, d]``, as engines pass them; the codecs are heads-first. Every row of the
cache lies in the shifted frame: ``r = k A - mu A`` and ``v' = v R_V - nu R_V``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvcq.codecs.codebook import snap_int8
from kvcq.codecs.packing import block_bytes as page_block_bytes
from kvcq.codecs.pair import HeadCodec
from kvcq.codecs.side import SideCodec
from kvcq.errors import UnsupportedError
from kvcq.kernels.cuda.fragments import map_fragments, search_fragments
from kvcq.spec.codec import VQ_WORDS, CodecSpec, Spacing
from kvcq.spec.plan import Windows

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class SideTables:
    """Constants of the keys or the values of one layer.

    Attributes:
        d: Head dim.
        map: A (or R_V) ``[H, d, d]``, served dtype.
        shift: ``mu A`` (or ``nu R_V``) ``[H, d]`` float32; zeros when not centred.
        dual: S with ``S = A^-T`` ``[H, d, d]``, served dtype: maps queries; values: its transpose leads outputs back.
        offset: mu (or nu) ``[H, d]`` float32, or None when not centred.
        groups: Scales of a row.
        bits: Bits of a code.
        rank: Index of the clip threshold among the ascending magnitudes of a row; ``d - 1`` clips nothing.
        spacing: How the levels are placed.
    """

    d: int
    map: Tensor
    shift: Tensor
    dual: Tensor
    offset: Tensor | None
    groups: int
    bits: int
    rank: int
    spacing: Spacing

    @classmethod
    def of(cls, name: str, side: SideCodec, heads: int, d: int, dtype: torch.dtype, device: torch.device) -> SideTables:
        """Read one side of a codec.

        Raises:
            UnsupportedError: what no kernel can do: the reason is the message.
        """
        _check(name, side.spec, d)
        eye = torch.eye(d, device=device).expand(heads, d, d)
        exact = eye if side.transform is None else side.transform.to(device)
        dual = eye if side.dual is None else side.dual.to(device)
        offset = None if side.offset is None else side.offset.to(device)
        held = exact.to(dtype)
        shift = torch.zeros(heads, d, device=device)
        if offset is not None:
            # In float64 and from the map as it is held: k A - mu A then cancels the mean exactly.
            shift = torch.bmm(offset.double()[:, None], held.double())[:, 0].float()
        ratio = side.spec.clip
        return cls(
            d=d,
            map=held.contiguous(),
            shift=shift.contiguous(),
            dual=dual.to(dtype).contiguous(),
            offset=offset,
            groups=side.spec.groups,
            bits=side.spec.bits,
            rank=min(int(ratio * d), d - 1),
            spacing=side.spec.spacing,
        )


@dataclass(frozen=True)
class Tables:
    """Constants of one layer.

    Attributes:
        k, v: The two sides.
        heads: KV heads H.
        words: Affine words of a token and head: the larger number of groups of the two sides.
        codebook: Keys in vector codes: int32 ``[H, d_k/4, 256]``, four int8 coordinates little-endian; else None.
        codebook_scale: float32 ``[H, d_k/4]``: a word is its coordinates times this; None without a codebook.
    """

    k: SideTables
    v: SideTables
    heads: int
    words: int
    codebook: Tensor | None
    codebook_scale: Tensor | None

    @classmethod
    def of(cls, codec: HeadCodec, heads: int, d_k: int, d_v: int, dtype: torch.dtype, device: torch.device) -> Tables:
        """Build the constants of a layer from its codec.

        Args:
            codec: The layer's codec.
            heads: KV heads.
            d_k: Key head dim.
            d_v: Value head dim.
            dtype: Served dtype of maps and exact rows: bfloat16 on GPUs, float16 or float32 in interpreter tests.
            device: Where the kernels run.

        Raises:
            UnsupportedError: a codec, head dim or group size that the kernels do not have.
        """
        if codec.v.words is not None:
            raise UnsupportedError("values in vector codes have no kernel", where="v", fix="use uniform values")
        book = scale = None
        if codec.k.words is not None:
            # Snapping snapped words gives back the very int8 coordinates and scales.
            coordinates, scale = snap_int8(codec.k.words.to(device))
            missing = VQ_WORDS - coordinates.shape[2]
            # Words that do not exist repeat the first one: the search takes the lowest of equals, so never one of them.
            filled = torch.cat([coordinates, coordinates[:, :, :1].expand(-1, -1, missing, -1)], 2)
            book = filled.contiguous().view(torch.int32)[..., 0].contiguous()
        k = SideTables.of("k", codec.k, heads, d_k, dtype, device)
        v = SideTables.of("v", codec.v, heads, d_v, dtype, device)
        return cls(k, v, heads, max(k.groups, v.groups), book, scale)

    @property
    def vq(self) -> bool:
        """True when keys are in vector codes."""
        return self.codebook is not None

    @property
    def block_bytes(self) -> int:
        """Bytes of one page block: 64 tokens of one head."""
        return page_block_bytes(self.k.d, self.v.d, self.words, (self.k.bits, self.v.bits))

    @cached_property
    def search(self) -> Tensor | None:
        """What `write` searches, ``[H, d_k/4, 8, 256]`` in the served dtype (float32 for float16); None without words.

        Rows 0..3 are minus the coordinates, rows 4 and 5 add up to the squared norm, row 6 is one, row 7 zero: all
        exact. Word ``32 a + 8 t + 2 j + e`` is in column ``32 a + 8 j + 2 t + e`` (t, j < 4, e < 2): in the registers
        of a matrix product one thread then holds eight neighbouring words.
        """
        if self.codebook is None:
            return None
        words = self.codebook[..., None].view(torch.int8).to(torch.int32).mT
        norm = words.square().sum(-2, keepdim=True)
        low = norm % 256
        rows = torch.cat([-words, norm - low, low, torch.ones_like(low), torch.zeros_like(low)], -2)
        ordered = rows.unflatten(-1, (-1, 4, 4, 2)).transpose(-2, -3).flatten(-4)
        return ordered.to(torch.bfloat16 if self.k.map.dtype == torch.bfloat16 else torch.float32).contiguous()

    @cached_property
    def key_map(self) -> Tensor:
        """The map of keys as `cuda/rows.cuh` reads it, see `map_fragments`."""
        return map_fragments(self.k.map)

    @cached_property
    def value_map(self) -> Tensor:
        """The map of values, likewise."""
        return map_fragments(self.v.map)

    @cached_property
    def key_search(self) -> Tensor | None:
        """The codebook as `cuda/write_keys.cu` reads it, see `search_fragments`; None without words."""
        if self.codebook is None or self.codebook_scale is None:
            return None
        return search_fragments(self.codebook, self.codebook_scale)


@dataclass(frozen=True)
class LayerCache:
    """Where the rows of one layer lie.

    Attributes:
        pages: Page blocks uint8 ``[pages, H, block bytes]``, see `codecs.packing`.
        sink_k, sink_v: Exact rows ``[slots, H, S, d]`` of the first S positions of each request, served dtype.
        ring_k, ring_v: Exact rows ``[slots, H, R, d]``, position p at ``p mod R``; R >= W + 1.
        windows: S and W.
    """

    pages: Tensor
    sink_k: Tensor
    sink_v: Tensor
    ring_k: Tensor
    ring_v: Tensor
    windows: Windows

    @property
    def ring(self) -> int:
        """Rows R of a ring."""
        return self.ring_k.shape[2]


@dataclass(frozen=True)
class Requests:
    """The requests of one step; every tensor int32 and on the device.

    Attributes:
        page_table: ``[B, columns]``: page of the tokens ``64 i .. 64 i + 63`` of a request.
        slots: ``[B]``: which sink and ring buffers a request has.
        lengths: ``[B]``: tokens stored, those of this step included; 0 for a padding row.
        exact_from: ``[B]``: before this position no exact row exists, sinks apart (a prefix hit); usually 0.
    """

    page_table: Tensor
    slots: Tensor
    lengths: Tensor
    exact_from: Tensor

    @property
    def batch(self) -> int:
        """Rows B."""
        return self.lengths.shape[0]


def _check(name: str, spec: CodecSpec, d: int) -> None:
    if d % 16 or d > MAX_HEAD_DIM:
        raise UnsupportedError(f"head dim {d}: kernels have multiples of 16 up to {MAX_HEAD_DIM}", where=name)
    # Pages hold 2 bits; with 4 everything else must be as in pages.
    reason = (spec.model_copy(update={"bits": 2}) if spec.bits == 4 else spec).unserved
    if reason is not None:
        raise UnsupportedError(f"no kernel: {reason}", where=name, fix="simulate this codec instead")
