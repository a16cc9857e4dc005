"""Tiny random models and a tiny tokenizer for tests: real transformers classes, nothing downloaded.

Weights have std 1/sqrt(fan_in) and norms, biases and sinks are randomised: with the library's own
initialisation attention is nearly uniform and damage to keys, softcap or scaling would hide.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, processors
from tokenizers.models import BPE
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

T0: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
# What a model type needs besides T0; None drops a T0 field that its configuration class does not take.
EXTRAS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 16},
    "qwen3_moe": MOE,
    "qwen3_next": MOE | LINEAR | {"layer_types": ["full_attention", "linear_attention"] * 2},
    "qwen3_5_text": LINEAR | {"layer_types": ["full_attention", "linear_attention"] * 2},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 32, "layer_types": ALTERNATING},
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"] * 3,
        "sliding_window": 16,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 6,
        "intermediate_size": [96] * 6,
    },
    "gpt_oss": MOE | {"sliding_window": 16},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 16},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "granite": {"attention_multiplier": 0.25},
    "stablelm": {"head_dim": None},
    "cohere2": {"sliding_window": 16},
    "olmo3": {"sliding_window": 16},
    "llama4_text": MOE | {"attention_chunk_size": 16, "intermediate_size_mlp": 96},
    "bitnet": {"head_dim": None},
    "gptj": {"rotary_dim": 8},
    "falcon": {"head_dim": None, "num_key_value_heads": None},
    "deepseek_v3": MOE
    | {
        "head_dim": None,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_group": 1,
        "topk_group": 1,
    },
    "mimo_v2_flash": MOE | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "v_head_dim": 16},
}


def tiny_model(model_type: str = "llama", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build a random model of a transformers type in fp32, eval mode, on the CPU; the global RNG is left alone.

    `overrides` are configuration fields. Windows are 16 tokens where the type has them.
    """
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {model_type}")
    defaults = {key: value for key, value in (T0 | EXTRAS.get(model_type, {})).items() if value is not None}
    config = AutoConfig.for_model(model_type, **defaults | overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim >= 2:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(noise * 0.2)
    return model


def tiny_tokens(length: int, *, seed: int = 0, vocab: int = 128) -> Tensor:
    """Return seeded random token ids, LongTensor [length], special ids excluded."""
    return torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(seed))


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(*, add_bos: bool = True, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Build a fast tokenizer of at most 128 ids: printable ASCII and a few merges, `<unk>` for the rest.

    Encoding puts `<s>` first with `add_bos`; pass `CHAT_TEMPLATE` for one with a chat template (which writes it too).
    """
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("i", "n"),
        ("a", "n"),
        ("an", "d"),
        ("e", "r"),
        ("o", "n"),
        ("i", "s"),
        (" ", "t"),
    ]
    words = ["<unk>", "<s>", "</s>", *string.digits, *string.ascii_letters, *string.punctuation, " ", "\n", "\t"]
    words += ["".join(pair) for pair in merges]
    core = Tokenizer(BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges, unk_token="<unk>"))  # noqa: S106
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words[:3]])
    if add_bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=512, **special)
    tokenizer.chat_template = chat_template
    return tokenizer


def save_tiny(path: Path, model_type: str = "llama", *, tokenizer: bool = True, **overrides: Any) -> Path:
    """Write a HuggingFace folder (config, safetensors, tokenizer) of a tiny model and return its path."""
    tiny_model(model_type, **overrides).save_pretrained(path)
    if tokenizer:
        tiny_tokenizer().save_pretrained(path)
    return path
