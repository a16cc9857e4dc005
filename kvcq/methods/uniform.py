"""Parameters shared by all methods that store keys and values in uniform 2-bit codes."""

from __future__ import annotations

from dataclasses import dataclass

from kvcq.errors import InputError
from kvcq.methods.base import Method, parameter
from kvcq.spec.codec import CodecSpec, Transform
from kvcq.spec.geometry import LayerGeometry

CLIP_K = "rank ratio of the symmetric key clip; 1 is off"
CLIP_V = "rank ratio of the symmetric value clip; 1 is off"


@dataclass(frozen=True)
class UniformMethod(Method):
    """Base of the min-max INT2 methods: clip off unless a subclass says otherwise."""

    clip_k: float = parameter(1.0, CLIP_K, low=0.01, high=1.0)
    clip_v: float = parameter(1.0, CLIP_V, low=0.01, high=1.0)
    groups: int = parameter(1, "scales per head vector; 1 and 4 are served", low=1)
    metadata: str = parameter(
        "fp16-bias",
        "stored scale pair; fp32-zero is the reference release's, for comparison only",
        choices=("fp16-bias", "fp32-zero"),
    )

    def codecs(
        self, geometry: LayerGeometry, transform: Transform = "identity", *, centred: bool = False
    ) -> tuple[CodecSpec, CodecSpec]:
        """Return the key and the value codec of a layer, which differ in their clip only.

        Raises:
            InputError: a head dimension that the groups do not divide.
        """
        for dims in (geometry.d_k, geometry.d_v):
            if dims % self.groups:
                raise InputError(
                    f"groups={self.groups} does not divide the head dimension {dims} of layer {geometry.layer}",
                    where=f"method {self.name}",
                    fix="use groups=1",
                )
        shared = {"transform": transform, "centred": centred, "groups": self.groups, "metadata": self.metadata}
        return CodecSpec(**shared, clip=self.clip_k), CodecSpec(**shared, clip=self.clip_v)
