"""TurboQuant: a random rotation and the levels of a normal distribution (arXiv 2504.19874)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcq.methods.base import FitContext, LayerFit, Method, parameter
from kvcq.spec.codec import CodecSpec

if TYPE_CHECKING:
    import numpy as np

    from kvcq.stats.view import LayerStats

# The seeds of the public implementations: 42, 1000 a layer, 500 more for values.
SEED = 42
LAYER_STEP = 1000
VALUE_STEP = 500


@dataclass(frozen=True)
class Turboquant(Method):
    """Each row over its norm, times a random orthogonal matrix, each channel to the nearest Lloyd-Max level.

    A channel of a random unit vector is close to N(0, 1/d), so the levels are those of N(0, 1) over sqrt(d). The norm
    is kept in fp16. Needs no statistics; the matrix is the Q of a seeded Gaussian, one a layer and side. This is the
    mean-squared-error part of the paper: no 1-bit residual (QJL) for keys.
    """

    name = "turboquant"
    summary = "random rotation, Lloyd-Max levels of a normal distribution, one norm per token; sees no data"
    paper = "arXiv 2504.19874"
    unserved = "levels without an affine form"

    bits_k: int = parameter(3, "bits of a key channel", choices=(2, 3, 4))
    bits_v: int = parameter(3, "bits of a value channel", choices=(2, 3, 4))

    def fit_layer(self, stats: LayerStats, context: FitContext) -> LayerFit:
        """Draw both rotations and solve for the levels."""
        geometry = stats.geometry
        seed = SEED + context.seed + LAYER_STEP * geometry.layer
        tensors = {
            **_side("k", geometry.kv_heads, geometry.d_k, self.bits_k, seed),
            **_side("v", geometry.kv_heads, geometry.d_v, self.bits_v, seed + VALUE_STEP),
        }
        return LayerFit(_codec(self.bits_k), _codec(self.bits_v), tensors)


def _codec(bits: int) -> CodecSpec:
    return CodecSpec(transform="orthogonal", quantizer="levels", unit="norm", bits=bits)


def _side(side: str, heads: int, d: int, bits: int, seed: int) -> dict[str, np.ndarray]:
    import torch

    from kvcq.codecs.levels import gaussian_levels
    from kvcq.methods.rotation import served
    from kvcq.transforms.orthogonal import random_rotation

    levels = torch.tensor(gaussian_levels(bits), dtype=torch.float64) / d**0.5
    return {
        f"{side}.transform": served(random_rotation(d, seed).expand(heads, -1, -1)),
        f"{side}.levels": served(levels.expand(heads, -1)),
    }
