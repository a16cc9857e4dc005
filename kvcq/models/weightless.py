"""Model folders without weights: a server that makes its own random ones has the shapes, memory and speed of the real.

The text that such a server answers is noise. The tokenizer is byte-level, so that nothing has to be fetched.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvcq.errors import InputError
from kvcq.spec.geometry import LayerGeometry, ModelGeometry, RopeSpec

LOAD_FORMAT = ("--load-format", "dummy")
BEGIN, END = "<|begin|>", "<|end|>"

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    # The shapes' own context is 40k; a longer one changes neither weights nor cost.
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "qwen3-4b": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
}


def shape_config(name: str, layers: int | None = None) -> dict[str, Any]:
    """Return the configuration of a shape.

    Args:
        name: Of `SHAPES`.
        layers: Fewer or more layers than the shape has.

    Raises:
        InputError: no such shape, or no layer.
    """
    if name not in SHAPES:
        raise InputError(f"{name!r} is no shape", where="--synthetic", fix=f"use {', '.join(SHAPES)}")
    if layers is not None and layers < 1:
        raise InputError(f"{layers} layers", where="--layers", fix="use 1 or more")
    config = dict(SHAPES[name])
    if layers is not None:
        config["num_hidden_layers"] = layers
    return config | {"max_window_layers": config["num_hidden_layers"]}


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Write configuration and tokenizer into a folder, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    special = [
        {"id": 256 + n, "content": token, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for n, token in enumerate((BEGIN, END))
    ]
    model = {"type": "BPE", "vocab": {char: n for n, char in enumerate(byte_characters())}, "merges": []}
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1000000,
    }
    ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    files = {
        "config.json": config,
        "generation_config.json": ends,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
    }
    for name, plain in files.items():
        (folder / name).write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


def byte_characters() -> list[str]:
    """Return the character that stands for each byte in byte-level vocabularies, sorted by character."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = range(256 - len(shown))
    return sorted([chr(n) for n in shown] + [chr(256 + n) for n in hidden])


def config_geometry(config: dict[str, Any]) -> ModelGeometry:
    """Return the geometry of a configuration of `shape_config`, whose layers are all alike."""
    d, layers = config["head_dim"], config["num_hidden_layers"]
    rope = RopeSpec(rotary_dims=d, inv_freq=tuple(float(config["rope_theta"]) ** (-2 * i / d) for i in range(d // 2)))
    return ModelGeometry(
        model_type=config["model_type"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        ropes=(rope,),
        layers=tuple(
            LayerGeometry(
                layer=layer,
                kind="full",
                q_heads=config["num_attention_heads"],
                kv_heads=config["num_key_value_heads"],
                d_k=d,
                d_v=d,
                scaling=d**-0.5,
                rope=0,
                unrotates=True,
            )
            for layer in range(layers)
        ),
    )


def step_weights(config: dict[str, Any]) -> int | None:
    """Return the bytes of BF16 weights that a decode step reads; None for a model that is not plain, dense and BF16.

    All matrices of the layers and the output head; of the embedding a step reads single rows.
    """
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    if any(not isinstance(config.get(name), int) for name in names):
        return None
    if any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")):
        return None
    if config.get("quantization_config"):
        return None
    hidden, inner, heads, layers, vocabulary = (int(config[name]) for name in names)
    d = config.get("head_dim") or hidden // heads
    kv = config.get("num_key_value_heads") or heads
    attention = hidden * d * (2 * heads + 2 * kv)
    return 2 * (layers * (attention + 3 * hidden * inner) + vocabulary * hidden)
