"""HeadCodec: encode, decode and the query side of one layer, shared by evaluation and runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcq.codecs.encoded import Encoded
from kvcq.codecs.side import Rotation, SideCodec
from kvcq.errors import UnsupportedError
from kvcq.spec.geometry import LayerGeometry
from kvcq.spec.plan import LayerPlan


def layer_roles(tensors: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """Select the tensors of one layer, file name ``layers.{layer}.{role}``, keyed by role."""
    prefix = f"layers.{layer}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class HeadCodec:
    """All KV heads of one layer, batched on a leading H axis.

    Rows are float32 (float64 stays float64, for exact tests). Keys are post-RoPE; query head i reads KV head
    i // group. Scores in the frame satisfy ``q~ . r + q . mu = q . k``.
    """

    k: SideCodec
    v: SideCodec

    @classmethod
    def build(
        cls,
        plan: LayerPlan,
        geometry: LayerGeometry,
        tensors: Mapping[str, Any],
        *,
        cast: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rotation: Rotation | None = None,
    ) -> HeadCodec:
        """Build the codec of a layer from its plan and its tensors by role (``k.transform`` ...).

        Args:
            plan: The layer's plan, quantized.
            geometry: Heads and dims of the layer.
            tensors: Arrays or tensors by role; see `layer_roles` for whole files.
            cast: Serving dtype: transforms, r and v' are rounded to it and computed in float32; None is exact.
            device: Where to compute.
            rotation: RoPE of the layer's keys; only codecs that code them before RoPE use it. None for NoPE.

        Raises:
            UnsupportedError: the layer stays BF16, or its codec does not fit the head dim.
            CorruptArtifactError: a tensor is missing or has another shape.
        """
        if plan.k is None or plan.v is None:
            raise UnsupportedError(f"layer {plan.layer} is not quantized", where="plan", fix=str(plan.reason))
        heads = geometry.kv_heads
        return cls(
            k=SideCodec.build("k", plan.k, (heads, geometry.d_k), tensors, cast=cast, device=device, rotation=rotation),
            v=SideCodec.build("v", plan.v, (heads, geometry.d_v), tensors, cast=cast, device=device),
        )

    def key_frame(self, k: Tensor) -> Tensor:
        """Return r = (k - mu) A of keys [H, T, d_k]."""
        return self.k.frame(k)

    def encode_keys(self, r: Tensor) -> Encoded:
        """Code key rows r [H, T, d_k] of the frame."""
        return self.k.encode(r)

    def decode_keys(self, encoded: Encoded) -> Tensor:
        """Return r_hat [H, T, d_k]."""
        return self.k.decode(encoded)

    def keys_hat(self, r: Tensor, positions: Tensor) -> Tensor:
        """Return what is read back of consecutive key rows r [H, T, d_k] at positions [T], see `SideCodec.hat`."""
        return self.k.hat(r, positions)

    def keys_back(self, r: Tensor) -> Tensor:
        """Return k = r A^-1 + mu [H, T, d_k] in the original frame."""
        return self.k.back(r)

    def query(self, q: Tensor) -> Tensor:
        """Return q~ = q S of queries [Hq, ..., d_k], same shape."""
        return _by_kv_head(q, self.k.dual)

    def query_offset(self, q: Tensor) -> Tensor:
        """Return q . mu [Hq, ...] of queries [Hq, ..., d_k]: what every score in the frame lacks."""
        if self.k.offset is None:
            return torch.zeros(q.shape[:-1], dtype=_wide(q), device=q.device)
        return _by_kv_head(q, self.k.offset.unsqueeze(-1)).squeeze(-1)

    def value_frame(self, v: Tensor) -> Tensor:
        """Return v' = (v - nu) R_V of values [H, T, d_v]."""
        return self.v.frame(v)

    def encode_values(self, rows: Tensor) -> Encoded:
        """Code value rows v' [H, T, d_v] of the frame."""
        return self.v.encode(rows)

    def decode_values(self, encoded: Encoded) -> Tensor:
        """Return v'_hat [H, T, d_v]."""
        return self.v.decode(encoded)

    def values_hat(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return what is read back of consecutive value rows v' [H, T, d_v] at token positions [T]."""
        return self.v.hat(rows, positions)

    def block(self, position: int) -> tuple[int, int]:
        """Return where rows handed to `keys_hat` and `values_hat` may begin, and should end, around `position`.

        Codecs of single rows return `position` twice; codecs of token groups the first position of the group that
        holds it, and the first border at or after it.
        """
        (k_begin, k_end), (v_begin, v_end) = self.k.block(position), self.v.block(position)
        return min(k_begin, v_begin), max(k_end, v_end)

    def values_back(self, rows: Tensor) -> Tensor:
        """Return v = v' R_V^T + nu [H, T, d_v] in the original frame."""
        return self.v.back(rows)

    def output(self, o: Tensor, mass: Tensor | None = None) -> Tensor:
        """Return o = o' R_V^T + nu m of attention outputs o' [Hq, ..., d_v] over frame values.

        Args:
            o: Outputs in the frame of values.
            mass: Softmax mass m [Hq, ...] of the rows stored shifted; None is 1 (no learned sinks).
        """
        back = _by_kv_head(o, None if self.v.dual is None else self.v.dual.mT)
        if self.v.offset is None:
            return back
        nu = self.v.offset.to(back.dtype).unsqueeze(1)
        rows = back.reshape(nu.shape[0], -1, back.shape[-1])
        shift = nu if mass is None else mass.to(back.dtype).reshape(nu.shape[0], -1, 1) * nu
        return (rows + shift).reshape(back.shape)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _by_kv_head(x: Tensor, matrix: Tensor | None) -> Tensor:
    """Multiply rows [Hq, ..., d] by the matrix [H, d, n] of their KV head."""
    rows = x.to(_wide(x))
    if matrix is None:
        return rows
    product = torch.bmm(rows.reshape(matrix.shape[0], -1, rows.shape[-1]), matrix.to(rows.dtype))
    return product.reshape(*rows.shape[:-1], matrix.shape[-1])
