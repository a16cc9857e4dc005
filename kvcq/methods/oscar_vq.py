"""OSCAR's key rotation with NOVA-KV's codebooks: a cross that tells the basis from the quantizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcq.methods.base import FitContext, LayerFit, parameter
from kvcq.methods.oscar import SIGNS, VALUE_TARGET, VALUE_TARGETS
from kvcq.methods.uniform import CLIP_V
from kvcq.methods.vector import VectorMethod
from kvcq.spec.codec import CodecSpec

if TYPE_CHECKING:
    from kvcq.stats.view import LayerStats


@dataclass(frozen=True)
class OscarVq(VectorMethod):
    """Keys ``r = k U H P`` of the query moment in product codebooks, values as in OSCAR.

    U H gives every channel the same mean query weight, so the plain distance of words stands in for NOVA-KV's metric:
    only what the weights of different channels have in common is lost. ``centred`` codes ``k - mu`` and ``v - nu`` as
    `OscarCentered` does.
    """

    name = "oscar-vq"
    summary = "keys: product codebooks in OSCAR's rotation; values: OSCAR's INT2"
    paper = "arXiv 2605.17757 and NOVA-KV, crossed"

    centred: bool = parameter(False, "code keys and values without their means")
    clip_v: float = parameter(0.92, CLIP_V, low=0.01, high=1.0)
    value_target: str = parameter("logit_energy", VALUE_TARGET, choices=VALUE_TARGETS)
    signs: int = parameter(0, SIGNS, low=0)

    def fit_layer(self, stats: LayerStats, context: FitContext) -> LayerFit:
        """Fit both rotations, the offsets when the method centres, and the codebooks."""
        from kvcq.methods.product import codebooks
        from kvcq.methods.rotation import SignDraw, offsets, oscar_rotation, served, value_moment

        draw = SignDraw(self.signs, context.seed, stats.geometry.layer)
        moment, value_notes = value_moment(stats, self.value_target, centred=self.centred)
        tensors = {
            "k.transform": served(oscar_rotation(stats.moments["q_second"], signs=draw)),
            "v.transform": served(oscar_rotation(moment, signs=draw._replace(side=1))),
        }
        if self.centred:
            tensors |= offsets(stats)
        words, key_notes = codebooks(tensors, stats, self, context.seed)
        return LayerFit(
            k=CodecSpec(transform="orthogonal", centred=self.centred, quantizer="group_vq", codebook=self.codebook),
            v=CodecSpec(transform="orthogonal", centred=self.centred, clip=self.clip_v),
            tensors=tensors | words,
            notes=key_notes | value_notes,
        )
