"""The codec of one side, keys or values, of all KV heads of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcq.codecs.clip import clip_rows
from kvcq.codecs.codebook import lookup, nearest
from kvcq.codecs.encoded import Encoded
from kvcq.codecs.levels import decode_levels, encode_levels, levels_hat
from kvcq.codecs.packing import CODES_PER_BYTE, pack2, unpack2
from kvcq.codecs.token_group import group_begin, group_end, token_group_hat
from kvcq.codecs.uniform import FP16_MAX, decode_uniform, encode_uniform
from kvcq.errors import CorruptArtifactError, UnsupportedError
from kvcq.spec.codec import VQ_GROUP, CodecSpec

RHO_FLOOR = 1e-8

Rotation = Callable[[Tensor, Tensor, bool], Tensor]
"""Turns rows [H, T, d] by the RoPE of their positions [T], or back when the last argument is True."""


@dataclass(frozen=True)
class SideCodec:
    """Encode r = (x - offset) A; the dual map S = A^(-T) serves products and the way back.

    Attributes:
        spec: The codec.
        transform: A [H, d, d] float32, None for the identity.
        dual: S [H, d, d] float32 (A itself when orthogonal), None for the identity.
        offset: [H, d] float32, None when not centred.
        words: Snapped centroids [H, d/4, words, 4] float32 of ``group_vq``.
        cast: Dtype in which serving holds transforms and rows; None is exact.
        levels: Ascending levels [H, 2^bits] float32 of ``levels``.
        bounds: Lower and upper bound of each channel [H, d, 2] float32, unit ``channel``.
        inner: Orthogonal map [H, d, d] float32 of un-rotated rows (``pre_rope``), None for the identity.
        order: Channel, head times d plus channel, at each place [H d] int64 of ``reordered`` rows.
        rotation: RoPE of the layer (``pre_rope``), None for a layer without positions.
    """

    spec: CodecSpec
    transform: Tensor | None
    dual: Tensor | None
    offset: Tensor | None
    words: Tensor | None
    cast: torch.dtype | None
    levels: Tensor | None = None
    bounds: Tensor | None = None
    inner: Tensor | None = None
    order: Tensor | None = None
    rotation: Rotation | None = None

    @classmethod
    def build(
        cls,
        side: str,
        spec: CodecSpec,
        shape: tuple[int, int],
        tensors: Mapping[str, Any],
        *,
        cast: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rotation: Rotation | None = None,
    ) -> SideCodec:
        """Read the tensors of one side (``k`` or ``v``) by role.

        Args:
            side: Prefix of the roles: ``k`` or ``v``.
            spec: The codec.
            shape: KV heads and head dim.
            tensors: Arrays or tensors by role; roles that the codec does not use are ignored.
            cast: Serving dtype of transforms and rows.
            device: Where to compute.
            rotation: RoPE of the layer, for codecs of un-rotated keys.

        Raises:
            UnsupportedError: groups that do not fit the head dim.
            CorruptArtifactError: a tensor is missing or has another shape.
        """
        heads, d = shape
        _check(side, spec, d)

        def load(role: str, *wanted: int) -> Tensor:
            name = f"{side}.{role}"
            if name not in tensors:
                raise CorruptArtifactError(f"tensor {name} is missing", fix="the codec needs it")
            tensor = torch.as_tensor(tensors[name], device=device)
            if len(wanted) != tensor.ndim or any(w not in (0, n) for w, n in zip(wanted, tensor.shape, strict=True)):
                raise CorruptArtifactError(
                    f"tensor {name} has shape {list(tensor.shape)}", fix=f"expected {list(wanted)} (0: any)"
                )
            return tensor.to(torch.float32)

        def held(role: str) -> Tensor:
            exact = load(role, heads, d, d)
            return exact if cast is None else exact.to(cast).to(torch.float32)

        mapped = None if spec.transform == "identity" else held("transform")
        transform = None if spec.pre_rope else mapped
        words = None
        if spec.quantizer == "group_vq":
            words = load("codebook", heads, d // VQ_GROUP, 0, VQ_GROUP)
            if spec.codebook == "int8":
                words = words * load("codebook_scale", heads, d // VQ_GROUP)[..., None, None]
        return cls(
            spec=spec,
            transform=transform,
            dual=held("query") if spec.transform == "metric" else transform,
            offset=load("offset", heads, d) if spec.centred else None,
            words=words,
            cast=cast,
            levels=load("levels", heads, 2**spec.bits) if spec.quantizer == "levels" else None,
            bounds=load("bounds", heads, d, 2) if spec.unit == "channel" else None,
            inner=mapped if spec.pre_rope else None,
            order=load("order", heads, d).long().flatten() if spec.reordered else None,
            rotation=rotation if spec.pre_rope else None,
        )

    def frame(self, x: Tensor) -> Tensor:
        """Return the stored rows r = (x - offset) A [H, T, d], float32 (float64 for float64 input)."""
        rows = x.double()
        if self.offset is not None:
            rows = rows - self.offset.unsqueeze(1).double()
        if self.transform is not None:
            # float64: a float32 product's last bits depend on its shape, and codes must not depend on neighbours.
            rows = torch.bmm(rows, self.transform.double())
        rows = rows.to(_exact(x).dtype)
        return rows if self.cast is None else rows.to(self.cast).to(rows.dtype)

    def back(self, rows: Tensor) -> Tensor:
        """Return x = r S^T + offset [H, T, d] in the original frame."""
        x = _exact(rows)
        if self.dual is not None:
            x = torch.bmm(x, self.dual.to(x.dtype).mT)
        return x if self.offset is None else x + self.offset.unsqueeze(1).to(x.dtype)

    def encode(self, rows: Tensor) -> Encoded:
        """Code frame rows [H, T, d].

        Raises:
            UnsupportedError: a codec that needs more than the row: its positions or its neighbours, see `hat`.
        """
        if not self.spec.by_row:
            raise UnsupportedError(f"no codes of single rows: {self.spec.unserved}", fix="simulate this codec instead")
        return self._encode(rows)

    def decode(self, encoded: Encoded) -> Tensor:
        """Return frame rows [H, T, d] float32 (quantizer ``none``: the rows as they came)."""
        spec = self.spec
        if spec.quantizer == "none":
            return encoded.codes
        if self.words is not None:
            return lookup(encoded.codes, self.words).mul_(encoded.scale.float())
        codes = unpack2(encoded.codes) if spec.bits == 2 else encoded.codes
        if self.levels is not None:
            return decode_levels(codes, encoded.scale, encoded.bias, self.levels, self.bounds)
        return decode_uniform(codes, encoded.scale, encoded.bias, spec.metadata)

    def hat(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return what is read back of consecutive rows once they are coded: fake quantization in the stored frame.

        Args:
            rows: Frame rows [H, T, d] of tokens that follow one another.
            positions: Their token positions [T] int64, ascending by one.

        Returns:
            [H, T, d] float32; for codecs that code single rows it is ``decode(encode(rows))`` at any position.
        """
        if not self.spec.pre_rope:
            return self._hat(rows, positions)
        # float64, as in `frame`: what is coded must not depend on the neighbours of a row.
        exact = rows.double()
        if self.rotation is not None:
            exact = self.rotation(exact, positions, True)
        if self.inner is not None:
            exact = torch.bmm(exact, self.inner.double())
        decoded = self._hat(exact.float(), positions).double()
        if self.inner is not None:
            decoded = torch.bmm(decoded, self.inner.double().mT)
        if self.rotation is not None:
            decoded = self.rotation(decoded, positions, False)
        return decoded.float()

    def block(self, position: int) -> tuple[int, int]:
        """Return begin and end of the rows that are coded together around `position`.

        The begin is at or before it, the end the first border at or after it: rows that end there are complete.
        Codecs of single rows return `position` twice.
        """
        if self.spec.quantizer != "token_group":
            return position, position
        return group_begin(position, self.spec), group_end(position, self.spec)

    def _hat(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return what is read back of rows in the frame that is coded."""
        if self.spec.quantizer == "token_group":
            first = int(positions[0]) if rows.shape[1] else self.spec.group_start
            return token_group_hat(rows.to(torch.float32), first, self.spec)
        if self.levels is not None and self.spec.outliers:
            return levels_hat(rows.to(torch.float32), self.levels, self.spec, self.bounds)
        if self.order is not None:
            return self._reordered_hat(rows.to(torch.float32), self.order)
        return self.decode(self._encode(rows))

    def _reordered_hat(self, rows: Tensor, order: Tensor) -> Tensor:
        """Return what is read back when every run of d / groups channels of the ordered token shares a scale."""
        heads, _, d = rows.shape
        spec, token = self.spec, rows.transpose(0, 1).flatten(1)
        coded = encode_uniform(token[:, order], heads * spec.groups, spec.bits, spec.metadata, spec.spacing)
        hat = torch.empty_like(token)
        hat[:, order] = decode_uniform(*coded[:3], spec.metadata)
        return hat.unflatten(1, (heads, d)).transpose(0, 1).contiguous()

    def _encode(self, rows: Tensor) -> Encoded:
        spec = self.spec
        if spec.quantizer == "none":
            empty = rows.new_empty(*rows.shape[:2], 0)
            return Encoded(rows, empty, empty, torch.zeros((), dtype=torch.int64, device=rows.device))
        rows = rows.to(torch.float32)
        if self.words is not None:
            return self._encode_vq(rows, self.words)
        if self.levels is not None:
            codes, scale, bias, clamped = encode_levels(rows, self.levels, spec, self.bounds)
            return Encoded(pack2(codes) if spec.bits == 2 else codes, scale, bias, clamped)
        clipped = clip_rows(rows, spec.clip)
        codes, scale, bias, clamped = encode_uniform(clipped, spec.groups, spec.bits, spec.metadata, spec.spacing)
        return Encoded(pack2(codes) if spec.bits == 2 else codes, scale, bias, clamped)

    def _encode_vq(self, rows: Tensor, words: Tensor) -> Encoded:
        """Code rows by group: index of the word nearest to r / rho, rho the stored RMS of the row (NOVA-KV)."""
        heads, tokens, d = rows.shape
        rho = rows.square().mean(-1, keepdim=True).sqrt().clamp(min=RHO_FLOOR)
        clamped = torch.zeros((), dtype=torch.int64, device=rows.device)
        if self.spec.metadata == "fp16-bias":
            clamped = (rho > FP16_MAX).sum()
            rho = rho.clamp(max=FP16_MAX).half()
        divisor = rho.float()
        # A row too small for float16 stores rho 0 and decodes to 0 whatever its index.
        x = torch.where(divisor > 0, rows / torch.where(divisor > 0, divisor, 1.0), 0.0)
        grouped = x.reshape(heads, tokens, d // VQ_GROUP, VQ_GROUP).transpose(1, 2).flatten(0, 1).contiguous()
        index = nearest(grouped, words.flatten(0, 1))
        codes = index.reshape(heads, d // VQ_GROUP, tokens).transpose(1, 2).contiguous()
        return Encoded(codes, rho, torch.zeros_like(rho), clamped)


def _exact(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def _check(side: str, spec: CodecSpec, d: int) -> None:
    if d % CODES_PER_BYTE or d % spec.groups:
        raise UnsupportedError(f"head dim {d} does not split into 4-code bytes and {spec.groups} groups", where=side)
    if spec.quantizer == "group_vq" and (spec.clip < 1.0 or spec.bits != 2):
        raise UnsupportedError("group_vq takes neither a clip nor other bits than 2", where=f"plan, {side}")
