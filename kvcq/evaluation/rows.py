"""Rows as served: exact and decoded keys and values of one layer in the codec's shifted frame.

Every tier lives in one frame, ``r = (k - mu) A`` and ``v' = (v - nu) R_V``, so that one mapped query ``q~ = q S``
serves all of them: ``q~ . r = q . (k - mu)``. The lost ``q . mu`` cancels in a softmax over shifted keys only;
`cap_logits` and `sink_logits` put it back where it does not cancel (softcap, learned sinks).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcq.codecs.pair import HeadCodec
from kvcq.codecs.side import SideCodec
from kvcq.spec.codec import CodecSpec


def bf16_rows() -> HeadCodec:
    """Return the reference cache as a codec: every row rounded to bfloat16, no shift, no transform, no codes."""
    side = SideCodec(CodecSpec(quantizer="none"), None, None, None, None, torch.bfloat16)
    return HeadCodec(side, side)


@dataclass(frozen=True)
class MixedRows:
    """Rows of one layer in the shifted frame, float32.

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
            query: Mapped queries, float32 ``[Hq, n, d]``.
            exact: Bool ``[n, T]``; True outside the coded range.

        Returns:
            Unscaled products, float32 ``[Hq, n, T]``.
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
            weights: Softmax weights, float32 ``[Hq, n, T]``.
            exact: Bool ``[n, T]``; True outside the coded range.

        Returns:
            Outputs in the shifted frame, float32 ``[Hq, n, dv]``.
        """
        coded = self.coded
        if coded.start == coded.stop:
            return grouped_mix(weights, self.values)
        decoded = grouped_mix(weights[..., coded] * ~exact[:, coded], self.values_hat)
        return decoded + grouped_mix(weights * exact, self.values)


def mixed_rows(codec: HeadCodec, k: Tensor, v: Tensor, start: int, stop: int) -> MixedRows:
    """Put keys ``[H, T, d]`` and values ``[H, T, dv]`` in the codec's frame and code the tokens [start, stop)."""
    keys, values = codec.key_frame(k.float()), codec.value_frame(v.float())
    keys_hat = codec.decode_keys(codec.encode_keys(keys[:, start:stop])) if start < stop else keys[:, :0]
    values_hat = codec.decode_values(codec.encode_values(values[:, start:stop])) if start < stop else values[:, :0]
    return MixedRows(keys.float(), values.float(), keys_hat.float(), values_hat.float(), start)


def grouped_products(query: Tensor, keys: Tensor) -> Tensor:
    """Return ``[Hq, n, T]`` products; query head i reads KV head ``i // group``."""
    heads, tokens, width = keys.shape
    return (query.reshape(heads, -1, width) @ keys.mT).reshape(*query.shape[:2], tokens)


def grouped_mix(weights: Tensor, values: Tensor) -> Tensor:
    """Return ``[Hq, n, dv]`` weighted sums of the values of each query head's KV head."""
    heads, tokens, width = values.shape
    return (weights.reshape(heads, -1, tokens) @ values).reshape(*weights.shape[:2], width)


def cap_logits(products: Tensor, offset: Tensor | None, scaling: float, softcap: float | None) -> Tensor:
    """Scale products ``[Hq, n, T]`` and apply the softcap, which needs ``q . mu`` (`offset`, ``[Hq, n]``) back."""
    logits = products * scaling
    if softcap is None:
        return logits
    if offset is not None:
        logits = logits + (offset * scaling)[..., None]
    return softcap * torch.tanh(logits / softcap)


def sink_logits(sinks: Tensor, offset: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Return sink logits ``[Hq, n]`` in the shifted frame, ``sink - scaling q . mu``, unless a softcap unshifts it.

    Args:
        sinks: One logit a query head, ``[Hq]``.
        offset: ``q . mu``, ``[Hq, n]``.
        scaling: Factor on products.
        softcap: The cap whose logits carry ``q . mu`` already, or None.
    """
    plain = sinks.to(offset)[:, None].expand_as(offset)
    return plain if softcap is not None else plain - scaling * offset
