"""What refusals ask of a model: its shape and its traits, out of its configuration alone, before weights load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kvcq.errors import UnsupportedError
from kvcq.models.fingerprint import BIAS_FLAGS, NORM_FLAGS, flags_of

# Why a model with a trait is not served.
TRAITS = MappingProxyType(
    {
        "mla": "it caches latents instead of keys and values (MLA)",
        "linear": "some of its layers keep a state instead of keys and values (Mamba, linear attention)",
        "sliding": "some of its layers see a sliding window, which SGLang keeps in a second pool",
        "chunked": "some of its layers see a chunk of the context",
        "encoder": "it has an encoder and cross attention",
        "images": "it mixes images or audio into the text, whose positions are not those of tokens",
        "heads": "its layers differ in heads or head size",
        "sparse": "its attention selects tokens by an index of its own",
        "listed": "SGLang lets it use its own list of attention backends only",
    }
)

# SGLang asserts on the backend's name for these, in every release of the window.
LISTED = ("Llama4", "Gemma4", "MossVL")
LINEAR_FIELDS = (
    "mamba_d_state",
    "mamba_num_heads",
    "ssm_state_size",
    "linear_num_key_heads",
    "linear_attn_config",
    "hybrid_override_pattern",
    "attn_type_list",
    "layer_group_size",
    "block_types",
)
LINEAR_KINDS = ("linear_attention", "mamba", "conv", "recurrent", "lightning")
ENCODER_NAMES = ("Whisper", "Mllama", "MossVL")
MIXED_FIELDS = ("vision_config", "audio_config", "thinker_config", "image_token_id", "audio_token_id")
# Of some layers: what they state beside the fields of all layers. SGLang itself adds some, with equal numbers.
HEAD_DIM_FIELDS = ("global_head_dim", "swa_head_dim")
KV_HEAD_FIELDS = ("num_global_key_value_heads", "swa_num_key_value_heads")
SPARSE_FIELDS = ("dual_chunk_attention_config", "index_topk", "sparse_attention_config", "compress_ratios")
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
# What older types of models call the same numbers.
OTHER_NAMES = MappingProxyType(
    {
        "num_attention_heads": ("n_head", "n_heads", "num_heads"),
        "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
        "hidden_size": ("n_embd", "d_model"),
    }
)


@dataclass(frozen=True)
class ModelFacts:
    """A model as its configuration describes it.

    Args:
        name: Architecture, for messages.
        layers: Number of layers.
        q_heads: Query heads of a layer, over all ranks.
        kv_heads: KV heads of a layer, over all ranks.
        d_k: Channels of a key.
        d_v: Channels of a value.
        dtype: In which SGLang would run it with ``--dtype auto``.
        named: The configuration names its architecture, which SGLang picks its own code by.
        traits: Keys of `TRAITS`.
        vocabulary: Rows of the embedding; None where it states none.
        flags: Of norms and biases, those that it states.
        rope: The rotary settings: ``rope_type``, ``rope_theta`` and what else they state; empty where there are none.
    """

    name: str
    layers: int
    q_heads: int
    kv_heads: int
    d_k: int
    d_v: int
    dtype: str = "bfloat16"
    named: bool = True
    traits: frozenset[str] = frozenset()
    vocabulary: int | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)


def model_facts(config: Mapping[str, Any], sglang: Any = None) -> ModelFacts:
    """Read a configuration as ``config.json`` holds it, overrides applied.

    Args:
        config: The whole configuration; the one of the text model is looked up inside it.
        sglang: SGLang's ``ModelConfig`` of the same model, whose own view of it is added.

    Raises:
        UnsupportedError: the configuration states no number of layers or heads that could be read.
    """
    text = _named(next((config[key] for key in TEXT_CONFIGS if isinstance(config.get(key), Mapping)), config))
    architectures = config.get("architectures")
    try:
        name = str(architectures[0] if architectures else config.get("model_type"))
        return _facts(name, config, text, sglang)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        reason = f"it states no {error}" if isinstance(error, KeyError) else str(error)
        raise UnsupportedError(
            f"the shape of its layers cannot be read: {reason}",
            where=f"{config.get('model_type')} config.json",
            fix="serve a model of full-attention layers that are alike",
        ) from error


def _named(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the usual names of numbers that are stated under others."""
    added = {}
    for usual, others in OTHER_NAMES.items():
        stated = next((text[name] for name in others if text.get(name) is not None), None)
        if text.get(usual) is None and stated is not None:
            added[usual] = stated
    return {**text, **added} if added else text


def _facts(name: str, config: Mapping[str, Any], text: Mapping[str, Any], sglang: Any) -> ModelFacts:
    q_heads = int(text["num_attention_heads"])
    d_k = int(text.get("head_dim") or text["hidden_size"] // q_heads)
    kv = text.get("num_key_value_heads")
    return ModelFacts(
        name=name,
        layers=int(text["num_hidden_layers"]),
        q_heads=q_heads,
        kv_heads=q_heads if kv is None or isinstance(kv, Sequence) else int(kv),
        d_k=d_k,
        d_v=int(text.get("v_head_dim") or d_k),
        dtype=_dtype(text) if sglang is None else str(sglang.dtype).removeprefix("torch."),
        named=bool(config.get("architectures")),
        traits=_traits(name, config, text) | (frozenset() if sglang is None else _seen(sglang)),
        vocabulary=text.get("vocab_size") if type(text.get("vocab_size")) is int else None,
        flags=flags_of(text, (*NORM_FLAGS, *BIAS_FLAGS)),
        rope=_rope(text),
    )


def _traits(name: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> frozenset[str]:
    kinds = [str(kind) for kind in text.get("layer_types") or text.get("layers_block_type") or ()]
    stated = {key for key, value in {**config, **text}.items() if value not in (None, (), [], {}, 0, False)}
    found = {
        "mla": bool(stated & {"kv_lora_rank", "qk_rope_head_dim"}),
        "linear": bool(stated & set(LINEAR_FIELDS)) or any(part in kind for kind in kinds for part in LINEAR_KINDS),
        "sliding": _slides(text, kinds),
        "chunked": "attention_chunk_size" in stated or any("chunked" in kind for kind in kinds),
        "encoder": bool(config.get("is_encoder_decoder")) or name.startswith(ENCODER_NAMES),
        "images": bool(stated & set(MIXED_FIELDS)),
        "heads": "block_configs" in stated or _heads_differ(text),
        "sparse": bool(stated & set(SPARSE_FIELDS)),
        "listed": name.startswith(LISTED),
    }
    return frozenset(trait for trait, holds in found.items() if holds)


def _heads_differ(text: Mapping[str, Any]) -> bool:
    """Say whether some layers have other heads than the rest."""
    kv, q_heads = text.get("num_key_value_heads"), text["num_attention_heads"]
    if isinstance(kv, Sequence):
        return True
    dims = {text.get("head_dim") or text["hidden_size"] // q_heads, *(text.get(name) for name in HEAD_DIM_FIELDS)}
    heads = {kv or q_heads, *(text.get(name) for name in KV_HEAD_FIELDS)}
    return len(dims - {None, 0}) > 1 or len(heads - {None, 0}) > 1


def _slides(text: Mapping[str, Any], kinds: Sequence[str]) -> bool:
    """Say whether a layer slides; without a list of kinds the window counts, unless a switch turns it off."""
    if kinds:
        return any("sliding" in kind for kind in kinds)
    return bool(text.get("sliding_window")) and text.get("use_sliding_window", True) is not False


def _seen(sglang: Any) -> frozenset[str]:
    """Return the traits that SGLang's own ``ModelConfig`` states."""
    found = {
        "mla": getattr(getattr(sglang, "attention_arch", None), "name", "MHA") == "MLA",
        "sliding": bool(getattr(sglang, "is_hybrid_swa", False)),
        "chunked": bool(getattr(sglang, "is_local_attention_model", False)),
        "encoder": bool(getattr(sglang, "is_encoder_decoder", False)),
        "images": bool(getattr(sglang, "is_multimodal", False)),
    }
    return frozenset(trait for trait, holds in found.items() if holds)


def _dtype(text: Mapping[str, Any]) -> str:
    """Return the dtype that SGLang picks: that of the checkpoint, and float16 for float32 but for Gemma."""
    stated = str(text.get("dtype") or text.get("torch_dtype") or "float32").removeprefix("torch.")
    if stated != "float32":
        return stated
    return "bfloat16" if str(text.get("model_type")).startswith("gemma") else "float16"


def _rope(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary settings under one spelling; older configurations spread them over several fields."""
    parameters = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    kind = parameters.pop("type", None)
    parameters.setdefault("rope_type", kind or "default")
    if text.get("rope_theta") is not None:
        parameters.setdefault("rope_theta", text["rope_theta"])
    if text.get("partial_rotary_factor") is not None:
        parameters.setdefault("partial_rotary_factor", text["partial_rotary_factor"])
    return MappingProxyType(parameters) if "rope_theta" in parameters else MappingProxyType({})
