"""Parameters shared by the methods that code keys in product codebooks, four channels a word."""

from __future__ import annotations

from dataclasses import dataclass

from kvcq.errors import UnsupportedError
from kvcq.methods.base import Method, parameter
from kvcq.spec.codec import VQ_GROUP
from kvcq.spec.geometry import LayerGeometry


@dataclass(frozen=True)
class VectorMethod(Method):
    """Base of the vector quantizers: how their codebooks are trained and stored."""

    iterations: int = parameter(25, "Lloyd steps of k-means", low=1, high=1000)
    rows: int = parameter(8192, "sampled keys a head behind its codebooks, at most", low=256)
    codebook: str = parameter("int8", "dtype of the words; only int8 is served", choices=("int8", "e4m3", "e5m2"))

    def check(self, layer: LayerGeometry) -> None:
        """Refuse a head dimension that groups of four do not divide."""
        if layer.d_k % VQ_GROUP:
            raise UnsupportedError(
                f"{self.name} codes {VQ_GROUP} channels a word, layer {layer.layer} has head dimension {layer.d_k}",
                fix="use oscar-centered",
            )
