"""NOVA-KV: keys in the query metric, coded by one product codebook; values as in OSCAR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcq.methods.base import FitContext, LayerFit, parameter
from kvcq.methods.oscar import VALUE_TARGET, VALUE_TARGETS
from kvcq.methods.uniform import CLIP_V
from kvcq.methods.vector import VectorMethod
from kvcq.spec.codec import CodecSpec

if TYPE_CHECKING:
    from kvcq.stats.view import LayerStats

FLOOR = "smallest eigenvalue of the query moment, relative"


@dataclass(frozen=True)
class Nova(VectorMethod):
    """Keys ``r = (k - mu) A`` in product codebooks, values as in OSCAR.

    A = M^{1/2} E: M is the query moment at unit mean eigenvalue, E the axes of M^{1/2} S_k M^{1/2}. The squared
    error of r is then the query-weighted error of k. Axes are dealt to groups of four channels; each row is divided
    by its RMS, and every group takes the nearest of 256 k-means words.

    Against the release: eigenvalues of M below `floor` times the largest are raised to it (the inverse explodes
    otherwise), the factor that scales M goes into the query side S = A^{-T}, and codebooks are rounded once, here,
    to the dtype that is served.
    """

    name = "nova"
    summary = "keys: product codebooks in the query metric; values: OSCAR's INT2"
    paper = "NOVA-KV, 'Spend Bits Where Queries Look'"

    partition: str = parameter(
        "deal", "how axes, by falling variance, go to groups", choices=("deal", "snake", "sorted", "random")
    )
    clip_v: float = parameter(0.92, CLIP_V, low=0.01, high=1.0)
    value_target: str = parameter("logit_energy", VALUE_TARGET, choices=VALUE_TARGETS)
    floor: float = parameter(1e-6, FLOOR, low=1e-12, high=1.0)

    def fit_layer(self, stats: LayerStats, context: FitContext) -> LayerFit:
        """Fit metric, codebooks and value rotation."""
        from kvcq.methods.product import codebooks, nova_tensors
        from kvcq.methods.rotation import oscar_rotation, served, value_moment

        keys = nova_tensors(stats, self, context.seed)
        words, key_notes = codebooks(keys, stats, self, context.seed)
        moment, value_notes = value_moment(stats, self.value_target)
        return LayerFit(
            k=CodecSpec(transform="metric", centred=True, quantizer="group_vq", codebook=self.codebook),
            v=CodecSpec(transform="orthogonal", clip=self.clip_v),
            tensors=keys | words | {"v.transform": served(oscar_rotation(moment))},
            notes=key_notes | value_notes,
        )
