"""Methods that code keys as they were before RoPE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcq.errors import UnsupportedError
from kvcq.methods.base import Method
from kvcq.spec.geometry import LayerGeometry

if TYPE_CHECKING:
    from torch import Tensor

    from kvcq.stats.view import LayerStats


@dataclass(frozen=True)
class PreRopeMethod(Method):
    """Base of the methods whose keys are un-rotated before they are coded."""

    unserved = "codes keys before RoPE"

    def check(self, layer: LayerGeometry) -> None:
        """Refuse a layer whose keys are not the rotation of a position-0 form."""
        if layer.rope is not None and not layer.unrotates:
            raise UnsupportedError(
                f"{self.name} codes keys before RoPE, and those of layer {layer.layer} do not un-rotate",
                where=f"method {self.name}",
                fix=f"keep the layer in BF16: --set skip_layers={layer.layer}",
            )


def unrotated_keys(stats: LayerStats, count: int) -> Tensor:
    """Return the first `count` sampled keys as they were before RoPE, ``[H, n, d_k]`` float64."""
    from kvcq.stats.rotary import rotate

    return rotate(stats.k_rows[:, :count].double(), stats.row_positions[:count], stats.rope, inverse=True)
