"""NOVA-KV's key metric with scalar codes: what the codebooks of `Nova` add to its basis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcq.methods.base import FitContext, LayerFit, parameter
from kvcq.methods.nova import FLOOR
from kvcq.methods.oscar import VALUE_TARGET, VALUE_TARGETS
from kvcq.methods.uniform import CLIP_K, CLIP_V, UniformMethod

if TYPE_CHECKING:
    from kvcq.stats.view import LayerStats


@dataclass(frozen=True)
class NovaSq(UniformMethod):
    """Keys ``r = (k - mu) A`` in uniform codes, A = M^{1/2} E as in `Nova`, values as in OSCAR.

    This is the basis that later OSCAR releases call ``whiten``. Its channels have falling variances, and one scale
    must cover them all: ``hadamard`` appends H P to A and to S = A^{-T}, which levels them.
    """

    name = "nova-sq"
    summary = "keys: INT2 in the query metric; values: OSCAR's INT2"
    paper = "NOVA-KV basis, scalar codes"

    clip_k: float = parameter(0.96, CLIP_K, low=0.01, high=1.0)
    clip_v: float = parameter(0.92, CLIP_V, low=0.01, high=1.0)
    hadamard: bool = parameter(False, "append H P to the metric transform")
    value_target: str = parameter("logit_energy", VALUE_TARGET, choices=VALUE_TARGETS)
    floor: float = parameter(1e-6, FLOOR, low=1e-12, high=1.0)

    def fit_layer(self, stats: LayerStats, context: FitContext) -> LayerFit:
        """Fit metric and value rotation."""
        from kvcq.methods.product import scalar_map
        from kvcq.methods.rotation import oscar_rotation, served, value_moment

        mapped = scalar_map(stats, self.floor, hadamard=self.hadamard)
        moment, notes = value_moment(stats, self.value_target)
        spec_k, _ = self.codecs(stats.geometry, "metric", centred=True)
        _, spec_v = self.codecs(stats.geometry, "orthogonal")
        tensors = {
            "k.transform": served(mapped.transform),
            "k.query": served(mapped.query),
            "k.offset": served(stats.moments["k_mean"]),
            "v.transform": served(oscar_rotation(moment)),
        }
        return LayerFit(spec_k, spec_v, tensors, notes)
