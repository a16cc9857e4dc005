"""One row a method: an easy and a hard setting, and what its tensors must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcq.spec.codec import Transform

BOTH_MAPS = ("k.transform", "v.transform")
OFFSETS = ("k.offset", "v.offset")
LEVELS = ("k.levels", "v.levels")
METRIC = (*BOTH_MAPS, "k.query", "k.offset")
WORDS = (*BOTH_MAPS, "k.codebook", "k.codebook_fp16")
CODEBOOK = (*METRIC, "k.codebook", "k.codebook_fp16")


@dataclass(frozen=True)
class Row:
    name: str
    params: dict[str, Any]
    k: Transform = "identity"
    v: Transform = "identity"
    roles: tuple[str, ...] = ()
    served: bool = True
    # Largest plain error, relative. Without H one scale serves unequal channels, and a metric gives up plain error.
    loss: float = 0.35

    @property
    def label(self) -> str:
        return "-".join([self.name, *(f"{key}={value}" for key, value in self.params.items())])


TABLE = (
    Row("naive-int2", {}),
    Row("naive-int2", {"groups": 4, "clip_k": 0.9, "metadata": "fp32-zero"}, served=False),
    Row("quarot-int2", {}, "orthogonal", "orthogonal", BOTH_MAPS),
    Row("quarot-int2", {"groups": 4, "clip_v": 0.92}, "orthogonal", "orthogonal", BOTH_MAPS),
    Row("klt-int2", {}, "orthogonal", "orthogonal", BOTH_MAPS),
    Row("klt-int2", {"groups": 4, "signs": 3}, "orthogonal", "orthogonal", BOTH_MAPS),
    Row("oscar", {}, "orthogonal", "orthogonal", BOTH_MAPS),
    Row(
        "oscar",
        {"granularity": "layer", "value_target": "attention_output", "groups": 4, "signs": 2},
        "orthogonal",
        "orthogonal",
        BOTH_MAPS,
    ),
    Row("oscar-centered", {}, "orthogonal", "orthogonal", BOTH_MAPS + OFFSETS),
    Row("oscar-centered", {"granularity": "layer", "groups": 4}, "orthogonal", "orthogonal", BOTH_MAPS + OFFSETS),
    Row("oscar", {"ablate": "no-u", "groups": 4, "signs": 1}, "orthogonal", "orthogonal", BOTH_MAPS),
    Row("oscar", {"ablate": "no-h", "key_target": "key"}, "orthogonal", "orthogonal", BOTH_MAPS, loss=0.4),
    Row(
        "oscar-centered",
        {"ablate": "no-p", "groups": 4, "key_target": "key", "value_target": "value"},
        "orthogonal",
        "orthogonal",
        BOTH_MAPS + OFFSETS,
    ),
    Row("oscar-lloyd", {}, "orthogonal", "orthogonal", BOTH_MAPS),
    Row("oscar-lloyd", {"variant": "main", "groups": 4, "signs": 2}, "orthogonal", "orthogonal", BOTH_MAPS),
    Row("oscar-vq", {"iterations": 4}, "orthogonal", "orthogonal", (*WORDS, "k.codebook_scale")),
    Row(
        "oscar-vq",
        {"iterations": 2, "codebook": "e5m2", "centred": True, "signs": 1, "rows": 512},
        "orthogonal",
        "orthogonal",
        WORDS + OFFSETS,
        served=False,
    ),
    Row("nova-sq", {}, "metric", "orthogonal", METRIC, loss=1.5),
    Row("nova-sq", {"hadamard": True, "groups": 4, "floor": 1e-3}, "metric", "orthogonal", METRIC),
    Row("nova", {"iterations": 4}, "metric", "orthogonal", (*CODEBOOK, "k.codebook_scale")),
    Row(
        "nova",
        {"iterations": 2, "codebook": "e4m3", "partition": "random", "floor": 1e-3, "rows": 512},
        "metric",
        "orthogonal",
        CODEBOOK,
        served=False,
    ),
    Row("kivi", {}, served=False),
    Row("kivi", {"group_tokens": 32, "group_channels": 16}, served=False),
    Row("kitty", {}, served=False),
    Row("kitty", {"promoted": 0.25, "group_tokens": 16}, served=False),
    Row("saw-int4", {}, "orthogonal", roles=("k.transform",), served=False),
    Row("saw-int4", {"rotate_values": True}, "orthogonal", "orthogonal", BOTH_MAPS, served=False),
    Row("turboquant", {}, "orthogonal", "orthogonal", BOTH_MAPS + LEVELS, served=False),
    Row("turboquant", {"bits_k": 4, "bits_v": 2}, "orthogonal", "orthogonal", BOTH_MAPS + LEVELS, served=False),
    Row("kvquant-nuq", {}, roles=("k.bounds", *LEVELS), served=False),
    Row("kvquant-nuq", {"bits": 3, "outliers": 0.0, "level_rows": 512}, roles=("k.bounds", *LEVELS), served=False),
    Row("rotatekv", {}, "orthogonal", "orthogonal", (*BOTH_MAPS, "k.order"), served=False),
    Row("rotatekv", {"group_channels": 8}, "orthogonal", "orthogonal", (*BOTH_MAPS, "k.order"), served=False),
)
