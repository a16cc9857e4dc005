import pytest
import torch

from kvcq.errors import UnsupportedError
from kvcq.models.attention import attention_hook, plain_attention
from kvcq.models.library import forward
from kvcq.models.rope import rope_specs
from tests.tiny import tiny_model, tiny_tokens

LONGROPE = {
    "head_dim": 16,
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
    },
}
YARN = {
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
}
DYNAMIC = {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}

# model type -> (overrides, expected of the first rotating layer, layers without rotation)
KINDS = {
    "llama": ({}, (32, "half", 1, "default"), []),
    "llama-yarn": (YARN, (32, "half", 1, "yarn"), []),
    "stablelm": ({}, (4, "half", 1, "default"), []),
    "phi3": (
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
        (16, "half", 1, "default"),
        [],
    ),
    "cohere2": ({}, (32, "interleaved", 1, "default"), [3]),
    "glm4": ({}, (16, "interleaved", 1, "default"), []),
    "gptj": ({}, (8, "interleaved", 1, "default"), []),
    "llama4_text": ({}, (32, "interleaved", 1, "default"), [3]),
    "nanochat": ({}, (32, "half", -1, "default"), []),
    "smollm3": ({}, (32, "half", 1, "default"), [3]),
    "gemma3_text": ({}, (32, "half", 1, "default"), []),
    "qwen3_next": ({}, (8, "half", 1, "default"), []),
    "gpt_oss": ({}, (32, "half", 1, "yarn"), []),
    "mimo_v2_flash": ({}, (10, "half", 1, "default"), []),
}


def keys(model, tokens, positions):
    found = {}

    def hook(call):
        found[call.layer] = call.key[0]
        return plain_attention(call)

    with attention_hook(model, hook):
        forward(model, tokens[None], positions=positions)
    return found


def rotate(x, positions, spec):
    """The definition of `RopeSpec`, pair by pair."""
    x, out = x.double(), x.double().clone()
    pairs = len(spec.inv_freq)
    for i, frequency in enumerate(spec.inv_freq):
        a, b = (i, i + pairs) if spec.pairing == "half" else (2 * i, 2 * i + 1)
        a, b = a + spec.offset, b + spec.offset
        angle = spec.sense * positions.double() * frequency
        out[..., a] = x[..., a] * angle.cos() - x[..., b] * angle.sin()
        out[..., b] = x[..., b] * angle.cos() + x[..., a] * angle.sin()
    return out.float()


@pytest.mark.parametrize("name", KINDS)
def test_rotating_by_the_spec_is_a_shift_of_positions(name):
    overrides, expected, nope = KINDS[name]
    model, tokens = tiny_model(name.split("-")[0], **overrides), tiny_tokens(12)
    try:
        specs, layers = rope_specs(model)
    except UnsupportedError:
        pytest.skip(f"{name} keeps its attention to itself in this version of transformers")
    first = specs[next(index for index in layers.values() if index is not None)]
    assert (first.rotary_dims, first.pairing, first.sense, first.regime) == expected
    assert [layer for layer, index in layers.items() if index is None] == nope
    base = keys(model, tokens, torch.arange(12))
    shifted = keys(model, tokens, torch.arange(12) + 50)
    for layer, index in layers.items():
        moved = base[layer] if index is None else rotate(base[layer], torch.full((12,), 50), specs[index])
        torch.testing.assert_close(moved, shifted[layer], rtol=1e-3, atol=1e-4)


def test_local_and_global_layers_keep_their_own_frequencies():
    specs, layers = rope_specs(tiny_model("gemma3_text"))
    assert layers == {0: 0, 1: 1, 2: 0, 3: 1}
    assert specs[0].inv_freq != specs[1].inv_freq


def test_yarn_records_its_scaling():
    specs, _ = rope_specs(tiny_model("llama", **YARN))
    assert specs[0].attention_scaling == pytest.approx(1.208, abs=1e-3)


def test_longrope_records_the_branch_that_the_length_selects():
    model = tiny_model("phi3", **LONGROPE)
    (short,), _ = rope_specs(model)
    (long,), _ = rope_specs(model, longest=200)
    assert (short.regime, long.regime) == ("longrope:short", "longrope:long")
    assert torch.allclose(torch.tensor(short.inv_freq), 4 * torch.tensor(long.inv_freq))
    assert rope_specs(model)[0] == (short,)


def test_dynamic_ntk_records_whether_it_is_stretched():
    model = tiny_model("llama", **DYNAMIC)
    assert rope_specs(model)[0][0].regime == "dynamic:short"
    (stretched,), _ = rope_specs(model, longest=200)
    assert stretched.regime == "dynamic:long"


def test_learned_positions_have_no_rotation():
    specs, layers = rope_specs(tiny_model("gpt2"))
    assert specs == ()
    assert set(layers.values()) == {None}
