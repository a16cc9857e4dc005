"""What each architecture must come out as: layer by layer, written down by hand from the model's own configuration."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from kvcq.spec.geometry import LayerGeometry, LayerKind, ModelGeometry
from tests.tiny import MOE

SLIDING, LINEAR = "sliding attention", "linear attention"


@dataclass(frozen=True)
class Layer:
    """One expected layer; `rope` is (rotary channels, pairing) or None for a layer without rotation."""

    kind: LayerKind = "full"
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (32, 32)
    rope: tuple[int, str] | None = (32, "half")
    scaling: float | None = None
    softcap: float | None = None
    sinks: bool = False
    window: int | None = None
    reason: str = ""


FULL = Layer()
WINDOW = Layer("sliding", window=16, reason=SLIDING)
STATE = Layer("linear", heads=(0, 0), dims=(0, 0), rope=None, reason=LINEAR)


@dataclass(frozen=True)
class Architecture:
    """A tiny model of a type: configuration fields beside those of `tests.tiny`, and its expected layers."""

    name: str
    layers: tuple[Layer, ...]
    fields: dict[str, Any] = field(default_factory=dict)
    regime: str = "default"

    @property
    def model_type(self) -> str:
        return self.name.partition(":")[0]

    @property
    def overrides(self) -> dict[str, Any]:
        return {"num_hidden_layers": len(self.layers)} | self.fields

    @property
    def quantized(self) -> list[int]:
        return [number for number, layer in enumerate(self.layers) if layer.kind == "full"]


def _half(rotary: int) -> Layer:
    return replace(FULL, rope=(rotary, "half"))


GLM = MOE | {"use_qk_norm": True, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
STABLE = {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 2}
NOPE = replace(FULL, rope=None)
CAPPED = replace(FULL, softcap=2.0)
SINKS = replace(FULL, sinks=True)
TURNING = (32, "interleaved")

ARCHITECTURES = (
    Architecture("llama", (FULL, FULL)),
    Architecture("mistral", (FULL, FULL), {"sliding_window": None}),
    Architecture("qwen2", (FULL, FULL)),
    Architecture("qwen3", (FULL, FULL)),
    Architecture("qwen3_moe", (FULL, FULL)),
    Architecture(
        "qwen3_next",
        (_half(8), STATE, _half(8)),
        {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
    ),
    Architecture("gemma2", (replace(WINDOW, softcap=2.0), CAPPED)),
    Architecture("gemma3_text", (WINDOW, FULL), {"layer_types": ["sliding_attention", "full_attention"]}),
    Architecture("gpt_oss", (replace(WINDOW, sinks=True), SINKS), regime="yarn"),
    Architecture("glm4_moe", (_half(16), _half(16)), GLM),
    Architecture("phi3", (replace(FULL, dims=(96, 96), rope=(96, "half")),) * 2, {"head_dim": 96}),
    Architecture("stablelm", (Layer(heads=(2, 2), dims=(80, 80), rope=(20, "half")),) * 2, STABLE),
    Architecture("olmo2", (FULL, FULL)),
    Architecture("smollm3", (FULL, FULL, FULL, NOPE)),
    Architecture("granite", (replace(FULL, scaling=0.25),) * 2),
    Architecture("cohere2", (*(replace(WINDOW, rope=TURNING),) * 3, NOPE)),
    Architecture("ernie4_5", (replace(FULL, rope=TURNING),) * 2),
    Architecture("minimax", (FULL, STATE), MOE | {"layer_types": ["full_attention", "linear_attention"]}),
    Architecture("nemotron", (_half(16), _half(16))),
    Architecture("falcon_h1", (FULL, FULL)),
)

# Model type -> what the one line must say.
REFUSED = {
    "falcon": "its own attention code path",
    "bloom": "its own attention code path",
    "mpt": "its own attention code path",
    "deepseek_v3": "MLA latent cache is not supported",
    "jetmoe": "4 KV heads, the configuration says 2",
    "diffllama": "calls attention 2 times a forward|its own attention code path",
    "mistral": "all layers are sliding",
}
LATENT = ("deepseek_v2", "deepseek_v3", "minicpm3", "glm4_moe_lite", "youtu", "deepseek_v32", "glm_moe_dsa")


def found(geometry: ModelGeometry, layer: LayerGeometry) -> Layer:
    """Return an observed layer in the form of the table; `scaling` only where it is not 1 / sqrt(d_k)."""
    rope = geometry.rope_of(layer)
    usual = layer.kind == "linear" or abs(layer.scaling - layer.d_k**-0.5) < 1e-6
    return Layer(
        kind=layer.kind,
        heads=(layer.q_heads, layer.kv_heads),
        dims=(layer.d_k, layer.d_v),
        rope=None if rope is None else (rope.rotary_dims, rope.pairing),
        scaling=None if usual else layer.scaling,
        softcap=layer.softcap,
        sinks=layer.sinks,
        window=layer.window,
    )
