"""Rows as served: exact and decoded keys and values of one layer in the codec's shifted frame.

Every tier lives in one frame, ``r = (k - mu) A`` and ``v' = (v - nu) R_V``, so that one mapped query ``q~ = q S``
serves all of them: ``q~ . r = q . (k - mu)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcq.codecs.attend import grouped_mix, grouped_products
from kvcq.codecs.pair import HeadCodec
from kvcq.codecs.side import SideCodec
from kvcq.spec.codec import CodecSpec


def bf16_rows() -> HeadCodec:
    """Return the reference cache as a codec: every row rounded to bfloat16, no shift, no transform, no codes."""
    side = SideCodec(CodecSpec(quantizer="none"), None, None, None, None, torch.bfloat16)
    return HeadCodec(side, side)


@dataclass(frozen=True)
class MixedRows:
    """Rows of one layer in the shifted frame, float32 (float64 of float64 keys).

    Attributes:
        keys: Exact rows r, ``[H, T, d]``.
        values: Exact rows v', ``[H, T, dv]``.
        keys_hat: Decoded rows of the coded range ``[start, start + C)``, ``[H, C, d]``.
        values_hat: The same for values, ``[H, C, dv]``.
        start: First coded token.
    """

    keys: Tensor
    values: Tensor
    keys_hat: Tensor
    values_hat: Tensor
    start: int

    @property
    def coded(self) -> slice:
        """The range of tokens that have a decoded twin."""
        return slice(self.start, self.start + self.keys_hat.shape[1])

    def products(self, query: Tensor, exact: Tensor) -> Tensor:
        """Return ``q~ . r`` with r decoded where `exact` is False.

        Args:
            query: Mapped queries ``[Hq, n, d]``.
            exact: Bool ``[n, T]``; True outside the coded range.

        Returns:
            Unscaled products ``[Hq, n, T]``.
        """
        products = grouped_products(query, self.keys)
        coded = self.coded
        if coded.start < coded.stop:
            decoded = grouped_products(query, self.keys_hat)
            products[..., coded] = torch.where(exact[:, coded], products[..., coded], decoded)
        return products

    def mix(self, weights: Tensor, exact: Tensor) -> Tensor:
        """Return ``weights @ V'`` with v' decoded where `exact` is False.

        Args:
            weights: Softmax weights ``[Hq, n, T]``.
            exact: Bool ``[n, T]``; True outside the coded range.

        Returns:
            Outputs in the shifted frame ``[Hq, n, dv]``.
        """
        coded = self.coded
        if coded.start == coded.stop:
            return grouped_mix(weights, self.values)
        decoded = grouped_mix(weights[..., coded] * ~exact[:, coded], self.values_hat)
        return decoded + grouped_mix(weights * exact, self.values)


def mixed_rows(codec: HeadCodec, k: Tensor, v: Tensor, start: int, stop: int) -> MixedRows:
    """Put keys ``[H, T, d]`` and values ``[H, T, dv]`` in the codec's frame and code the tokens [start, stop).

    Row t is the token at position t. Codecs of token groups see the rows up to the end of the last group as well.
    """
    dtype = wide(k)
    keys, values = codec.key_frame(k.to(dtype)), codec.value_frame(v.to(dtype))
    keys_hat, values_hat = keys[:, :0], values[:, :0]
    if start < stop:
        end = min(codec.block(stop)[1], keys.shape[1])
        positions = torch.arange(start, end, device=keys.device)
        keys_hat = codec.keys_hat(keys[:, start:end], positions)[:, : stop - start]
        values_hat = codec.values_hat(values[:, start:end], positions)[:, : stop - start]
    return MixedRows(keys, values, keys_hat.to(dtype), values_hat.to(dtype), start)


def wide(rows: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float64 for float64 rows, else float32."""
    return torch.float64 if rows.dtype == torch.float64 else torch.float32
