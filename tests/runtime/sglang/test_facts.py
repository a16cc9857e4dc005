"""What a configuration says of its model, in every spelling, and what SGLang itself sees."""

import json
from types import SimpleNamespace

import pytest

from kvcq.runtime.sglang.facts import model_facts
from kvcq.runtime.sglang.refusals import refusals
from tests.runtime.sglang.stated import CONFIG, MODEL, flags_of, served


@pytest.mark.parametrize(
    ("trait", "changes"),
    [
        ("mla", {"kv_lora_rank": 512}),
        ("linear", {"layer_types": ["linear_attention", "full_attention"]}),
        ("linear", {"mamba_d_state": 16}),
        ("linear", {"layers_block_type": ["mamba", "attention"]}),
        ("sliding", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("sliding", {"sliding_window": 4096}),
        ("chunked", {"attention_chunk_size": 8192}),
        ("encoder", {"is_encoder_decoder": True}),
        ("images", {"vision_config": {"depth": 2}}),
        ("heads", {"global_head_dim": 512}),
        ("heads", {"swa_head_dim": 64}),
        ("heads", {"swa_num_key_value_heads": 2}),
        ("heads", {"num_global_key_value_heads": 8}),
        ("heads", {"head_dim": None, "swa_head_dim": 64}),
        ("heads", {"num_key_value_heads": None, "swa_num_key_value_heads": 4}),
        ("heads", {"num_key_value_heads": [4, 2]}),
        ("heads", {"num_key_value_heads": (4, 4)}),
        ("heads", {"block_configs": [{"attention": {"n_heads_in_group": 8}}]}),
        ("sparse", {"dual_chunk_attention_config": {"chunk_size": 8}}),
        ("listed", {"architectures": ["Llama4ForCausalLM"]}),
    ],
)
def test_a_configuration_shows_its_traits(trait, changes):
    assert model_facts({**CONFIG, **changes}).traits == {trait}


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": 4096, "layer_types": ["full_attention", "full_attention"]},
        {"is_encoder_decoder": False, "attention_chunk_size": None},
        {"num_experts": 8, "vision_config": None},
        # SGLang adds these to every configuration, with the numbers of all layers.
        {"swa_head_dim": 32, "swa_num_key_value_heads": 4},
        {"head_dim": None, "swa_head_dim": 32},
        {"num_key_value_heads": None, "swa_num_key_value_heads": 8},
        {"swa_head_dim": None, "global_head_dim": 0, "num_global_key_value_heads": None},
        {"block_configs": None},
    ],
)
def test_a_plain_model_has_no_traits(changes):
    assert model_facts({**CONFIG, **changes}).traits == frozenset()


def test_a_configuration_without_an_architecture_is_refused_with_the_way_to_name_it():
    found = refusals(served(), model_facts({**CONFIG, "architectures": None}))
    assert [refusal.flag for refusal in found] == ["llama config.json"]
    assert "--json-model-override-args" in found[0].remedy


def test_a_text_model_inside_a_larger_configuration_is_the_one_that_counts():
    inner = {**CONFIG, "num_hidden_layers": 7}
    found = model_facts(
        {"architectures": ["Net"], "model_type": "net", "text_config": inner, "vision_config": {"a": 1}}
    )
    assert (found.name, found.layers, found.traits) == ("Net", 7, {"images"})


def test_what_sglang_itself_sees_is_added():
    seen = SimpleNamespace(
        attention_arch=SimpleNamespace(name="MLA"),
        is_hybrid_swa=True,
        is_local_attention_model=True,
        is_encoder_decoder=True,
        is_multimodal=True,
        dtype="torch.float16",
    )
    found = model_facts(CONFIG, seen)
    assert found.traits == {"mla", "sliding", "chunked", "encoder", "images"} and found.dtype == "float16"
    plain = SimpleNamespace(attention_arch=SimpleNamespace(name="MHA"), is_multimodal=False, dtype="torch.bfloat16")
    assert model_facts(CONFIG, plain) == MODEL


def test_heads_and_sizes_default_as_in_models():
    found = model_facts({**CONFIG, "num_key_value_heads": None, "head_dim": None})
    assert (found.kv_heads, found.d_k, found.d_v) == (8, 32, 32)
    assert model_facts({**CONFIG, "v_head_dim": 64}).d_v == 64


def test_older_spellings_of_rotary_settings_read_the_same():
    old = {key: value for key, value in CONFIG.items() if key != "rope_parameters"}
    assert model_facts({**old, "rope_theta": 10000.0}).rope == MODEL.rope
    scaled = model_facts({**old, "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert dict(scaled.rope) == {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    assert (
        model_facts({**old, "rope_theta": 10000.0, "partial_rotary_factor": 0.5}).rope["partial_rotary_factor"] == 0.5
    )


@pytest.mark.parametrize(
    ("stated", "model_type", "runs"),
    [
        ("bfloat16", "llama", "bfloat16"),
        ("float16", "llama", "float16"),
        ("float32", "llama", "float16"),
        (None, "llama", "float16"),
        ("float32", "gemma2", "bfloat16"),
    ],
)
def test_the_dtype_that_sglang_would_pick_is_refused_unless_it_is_bfloat16(stated, model_type, runs):
    model = model_facts({**CONFIG, "dtype": stated, "model_type": model_type})
    assert model.dtype == runs
    assert flags_of(refusals(served(), model)) == ([] if runs == "bfloat16" else ["--dtype"])
    assert refusals(served(dtype="bfloat16"), model) == ()


def test_real_configurations_are_read_as_their_models_are():
    qwen = {
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 128,
        "hidden_size": 4096,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
    }
    found = model_facts(json.loads(json.dumps(qwen)))
    assert (found.layers, found.q_heads, found.kv_heads, found.d_k, found.dtype) == (36, 32, 8, 128, "bfloat16")
    assert found.traits == frozenset() and dict(found.rope) == {"rope_type": "default", "rope_theta": 1000000}
