"""OSCAR: rotations fitted to what attention reads (arXiv 2605.17757)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

from kvcq.methods.base import FitContext, LayerFit, parameter
from kvcq.methods.uniform import CLIP_K, CLIP_V, UniformMethod

if TYPE_CHECKING:
    from kvcq.stats.view import LayerStats
    from kvcq.transforms.spectral import Ablation

VALUE_TARGET = "moment behind the value rotation: the release's logit energy, the paper's attention output, or E[v'v]"
VALUE_TARGETS = ("logit_energy", "attention_output", "value")
SIGNS = "draw of the eigenvector signs; 0 is the sign rule"


@dataclass(frozen=True)
class Oscar(UniformMethod):
    """Keys in ``R_K = U H P`` of the query moment C_Q, values in that of C_S; clipped min-max INT2.

    C_Q = E[q'q] over the query heads of a KV head. C_S is ``logit_energy``: E[w v'v] over the sampled rows with
    weights w = k C_Q k' of mean 1 (what the release computes), or ``attention_output``: E[o'o] (what the paper
    states). ``granularity=layer`` averages both over the KV heads and shares the rotation, as the v1 release does;
    the note ``shared_cost`` says by which factor that raises, or would raise, the key error of each head.

    For the paper's ablations ``ablate`` leaves out a factor of U H P, on both sides; ``key_target=key`` and
    ``value_target=value`` take the moments of what is coded instead of what reads it.
    """

    name = "oscar"
    summary = "rotations from the query moment and the attention-weighted value moment, clipped INT2"
    paper = "arXiv 2605.17757"
    centred: ClassVar[bool] = False

    clip_k: float = parameter(0.96, CLIP_K, low=0.01, high=1.0)
    clip_v: float = parameter(0.92, CLIP_V, low=0.01, high=1.0)
    granularity: str = parameter("head", "one rotation a KV head, or one a layer", choices=("head", "layer"))
    key_target: str = parameter("query", "moment behind the key rotation: E[q'q] or E[k'k]", choices=("query", "key"))
    value_target: str = parameter("logit_energy", VALUE_TARGET, choices=VALUE_TARGETS)
    ablate: str = parameter("none", "factor of U H P to leave out", choices=("none", "no-u", "no-h", "no-p"))
    signs: int = parameter(0, SIGNS, low=0)

    def fit_layer(self, stats: LayerStats, context: FitContext) -> LayerFit:
        """Fit both rotations, and the offsets when the method centres."""
        from kvcq.methods.gain import shared_cost
        from kvcq.methods.rotation import SignDraw, key_moment, offsets, oscar_rotation, served, value_moment

        spec_k, spec_v = self.codecs(stats.geometry, "orthogonal", centred=self.centred)
        draw = SignDraw(self.signs, context.seed, stats.geometry.layer)
        shared, ablate = self.granularity == "layer", cast("Ablation", self.ablate)
        keys = key_moment(stats, self.key_target, centred=self.centred)
        values, notes = value_moment(stats, self.value_target, centred=self.centred)
        tensors = {
            "k.transform": served(oscar_rotation(keys, shared=shared, signs=draw, ablate=ablate)),
            "v.transform": served(oscar_rotation(values, shared=shared, signs=draw._replace(side=1), ablate=ablate)),
        }
        if self.centred:
            tensors |= offsets(stats)
        if stats.geometry.kv_heads > 1 and stats.k_rows.shape[1]:
            rotation = oscar_rotation(keys, shared=not shared, signs=draw, ablate=ablate)
            other = tensors | {"k.transform": served(rotation)}
            pair = (tensors, other) if shared else (other, tensors)
            notes["shared_cost"] = shared_cost(spec_k, *pair, stats.k_rows)
        return LayerFit(spec_k, spec_v, tensors, notes)
