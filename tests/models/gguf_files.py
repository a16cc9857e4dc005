"""GGUF files for tests: raw headers written field by field, and a very small real model."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from gguf import MODEL_ARCH, GGUFWriter, TokenType, get_tensor_name_map

from tests.tiny import tiny_model, tiny_tokenizer

U8, U32, I32, F32, BOOL, STRING, ARRAY = 0, 4, 5, 6, 7, 8, 9
FLOAT32, FLOAT16, Q8_0 = 0, 1, 8


def text(value: str | bytes) -> bytes:
    """A length and its bytes."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: int, payload: bytes) -> bytes:
    """One key and value."""
    return text(key) + struct.pack("<I", kind) + payload


def array(kind: int, length: int, payload: bytes = b"") -> bytes:
    """The value of an array entry that claims `length` elements."""
    return struct.pack("<IQ", kind, length) + payload


def tensor(name: str | bytes, shape: tuple[int, ...], kind: int = FLOAT32, offset: int = 0) -> bytes:
    """The record of one tensor."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ARCHITECTURE = entry("general.architecture", STRING, text("llama"))
EMBEDDING = tensor("token_embd.weight", (8, 4))


def header(
    *parts: bytes, tensors: int = 1, entries: int = 1, version: int = 3, data: int = 128, magic: bytes = b"GGUF"
) -> bytes:
    """A file of these parts, by default one entry, one tensor and 128 bytes of data."""
    body = magic + struct.pack("<IQQ", version, tensors, entries) + b"".join(parts)
    return body + bytes(-len(body) % 32 + data)


def write_small(path: Path) -> Path:
    """Write a llama of one layer and 16 channels with its byte-pair vocabulary."""
    model = tiny_model(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                       num_key_value_heads=1, head_dim=8)  # fmt: skip
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(8)
    writer.add_value_length(8)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_vocab_size(128)
    vocabulary = tiny_tokenizer().get_vocab()
    words = sorted(vocabulary, key=lambda word: vocabulary[word])
    words += [f"<unused{i}>" for i in range(128 - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 125)
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, 1)
    for name, weight in model.state_dict().items():
        writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(weight.half().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
