"""Parameters shared by all methods that store keys and values in uniform 2-bit codes."""

from __future__ import annotations

from dataclasses import dataclass

from kvcq.errors import InputError
from kvcq.methods.base import Method, parameter
from kvcq.spec.codec import SERVED_GROUPS, CodecSpec, Spacing, Transform
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

    @property
    def spacing(self) -> Spacing:
        """How encoders place the levels."""
        return "minmax"

    def check(self, layer: LayerGeometry) -> None:
        """Refuse groups that do not divide a head dimension; the line lists those that do."""
        for dims in (layer.d_k, layer.d_v):
            if dims % self.groups:
                allowed = [f"{n} ({dims // n} channels each)" for n in SERVED_GROUPS if dims % n == 0]
                others = [str(n) for n in range(1, dims + 1) if dims % n == 0 and n not in SERVED_GROUPS]
                raise InputError(
                    f"groups={self.groups} does not divide the head dimension {dims} of layer {layer.layer}",
                    where=f"method {self.name}",
                    fix=f"use groups={' or '.join(allowed)}; to compare only: {', '.join(others)}",
                )

    def codecs(
        self, geometry: LayerGeometry, transform: Transform = "identity", *, centred: bool = False
    ) -> tuple[CodecSpec, CodecSpec]:
        """Return the key and the value codec of a layer, which differ in their clip only."""
        shared = {"transform": transform, "centred": centred, "groups": self.groups, "metadata": self.metadata}
        shared |= {"spacing": self.spacing}
        return CodecSpec(**shared, clip=self.clip_k), CodecSpec(**shared, clip=self.clip_v)
