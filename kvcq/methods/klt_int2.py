"""KLT INT2: OSCAR's composition fitted to the keys and values themselves instead of to what reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcq.methods.base import FitContext, LayerFit, parameter
from kvcq.methods.oscar import SIGNS
from kvcq.methods.uniform import CLIP_K, CLIP_V, UniformMethod

if TYPE_CHECKING:
    from kvcq.stats.view import LayerStats


@dataclass(frozen=True)
class KltInt2(UniformMethod):
    """``R = U H P`` with U the eigenvectors of E[k'k] and of E[v'v] per KV head, uncentred (OSCAR's table 4)."""

    name = "klt-int2"
    summary = "OSCAR's rotation fitted to E[k'k] and E[v'v], blind to queries"
    paper = "arXiv 2605.17757, ablation"

    clip_k: float = parameter(0.96, CLIP_K, low=0.01, high=1.0)
    clip_v: float = parameter(0.92, CLIP_V, low=0.01, high=1.0)
    signs: int = parameter(0, SIGNS, low=0)

    def fit_layer(self, stats: LayerStats, context: FitContext) -> LayerFit:
        """Fit both rotations from the second moments."""
        from kvcq.methods.rotation import SignDraw, oscar_rotation, served

        draw = SignDraw(self.signs, context.seed, stats.geometry.layer)
        tensors = {
            "k.transform": served(oscar_rotation(stats.moments["k_second"], signs=draw)),
            "v.transform": served(oscar_rotation(stats.moments["v_second"], signs=draw._replace(side=1))),
        }
        return LayerFit(*self.codecs(stats.geometry, "orthogonal"), tensors)
