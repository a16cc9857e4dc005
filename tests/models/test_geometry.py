import pytest
import torch

from kvcq.errors import UnsupportedError
from kvcq.models.attention import attention_hook, plain_attention
from kvcq.models.geometry import observed_geometry, plan_geometry, require_quantizable
from kvcq.models.library import forward
from tests.tiny import tiny_model, tiny_tokens

FULL, SLIDING, LINEAR, CHUNKED = "full", "sliding", "linear", "chunked"
LAYERS = {
    "llama": [FULL] * 4,
    "mistral": [SLIDING] * 4,
    "qwen2": [FULL] * 4,
    "gemma2": [SLIDING, FULL] * 2,
    "gemma3_text": [SLIDING, FULL] * 2,
    "gpt_oss": [SLIDING, FULL] * 2,
    "cohere2": [SLIDING, SLIDING, SLIDING, FULL],
    "llama4_text": [CHUNKED, CHUNKED, CHUNKED, FULL],
    "qwen3_next": [FULL, LINEAR] * 2,
    "falcon_h1": [FULL] * 4,
    "gemma3n_text": [FULL, SLIDING, FULL, SLIDING, "shared", "shared"],
}


@pytest.mark.parametrize("model_type", LAYERS)
def test_every_layer_gets_its_kind(model_type):
    geometry = plan_geometry(tiny_model(model_type))
    assert [layer.kind for layer in geometry.layers] == LAYERS[model_type]
    assert [layer.layer for layer in geometry.layers] == list(range(len(geometry.layers)))


def test_heads_scaling_and_extras_come_from_the_calls():
    gemma = plan_geometry(tiny_model("gemma2")).layers[1]
    assert (gemma.softcap, gemma.window, gemma.sinks) == (2.0, None, False)
    assert plan_geometry(tiny_model("gpt_oss")).layers[0].sinks
    assert plan_geometry(tiny_model("granite")).layers[0].scaling == 0.25
    mimo = plan_geometry(tiny_model("mimo_v2_flash")).layers
    assert [(layer.kv_heads, layer.d_k, layer.d_v) for layer in mimo] == [(2, 32, 16), *[(4, 32, 16)] * 3]


def test_head_dim_is_not_hidden_over_heads():
    layer = plan_geometry(tiny_model("gpt_oss", hidden_size=80, num_attention_heads=4, head_dim=32)).layers[1]
    assert (layer.q_heads, layer.d_k) == (4, 32)


def test_shared_layers_name_the_layer_whose_cache_they_read():
    layers = plan_geometry(tiny_model("gemma3n_text")).layers
    assert {layer.layer: layer.source for layer in layers if layer.kind == "shared"} == {4: 2, 5: 3}


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("falcon", "attention cannot be observed"),
        ("bloom", "attention cannot be observed"),
        ("mpt", "attention cannot be observed"),
        ("deepseek_v3", "MLA latent cache is not supported"),
        ("minicpm3", "MLA latent cache is not supported"),
        ("diffllama", "cannot be observed"),
        ("jetmoe", "4 KV heads, the configuration says 2"),
        ("doge", "attention mask of shape"),
    ],
)
def test_what_cannot_be_captured_is_refused_in_one_line(model_type, reason):
    with pytest.raises(UnsupportedError, match=reason) as refusal:
        plan_geometry(tiny_model(model_type))
    assert "\n" not in str(refusal.value)
    assert model_type in str(refusal.value) or "layer 0" in str(refusal.value)


class OwnSoftmax(torch.nn.Module):
    def forward(self, hidden_states, **_):
        return torch.softmax(hidden_states, dim=-1), None


def test_a_layer_that_bypasses_the_hook_is_named():
    model = tiny_model()
    model.model.layers[2].self_attn = OwnSoftmax()
    with pytest.raises(UnsupportedError, match="layer 2"):
        plan_geometry(model)


def test_a_model_without_full_layers_is_refused_with_its_window():
    with pytest.raises(UnsupportedError, match=r"all layers are sliding.*sliding_window to null.*16 tokens"):
        require_quantizable(plan_geometry(tiny_model("mistral")))
    require_quantizable(plan_geometry(tiny_model("mistral", sliding_window=None)))


def calls_of(model):
    calls = {}

    def hook(call):
        calls[call.layer] = call
        return plain_attention(call)

    with attention_hook(model, hook):
        forward(model, tiny_tokens(20)[None])
    return calls


@pytest.mark.parametrize("model_type", ["llama", "gemma3n_text", "qwen3_next"])
def test_observation_confirms_the_plan_and_records_the_shift_check(model_type):
    model = tiny_model(model_type)
    planned = plan_geometry(model)
    observed = observed_geometry(planned, calls_of(model), {0: True})
    assert [layer.layer for layer in observed.layers if layer.unrotates] == [0]
    same = observed.layers[0].model_copy(update={"unrotates": False})
    assert same == planned.layers[0]


def test_observation_refuses_a_missing_or_different_layer():
    planned = plan_geometry(tiny_model())
    calls = calls_of(tiny_model())
    with pytest.raises(UnsupportedError, match="layer 3"):
        observed_geometry(planned, {layer: call for layer, call in calls.items() if layer != 3}, {})
    with pytest.raises(UnsupportedError, match="4/4 heads"):
        observed_geometry(planned, calls_of(tiny_model(num_key_value_heads=4)), {})


def test_planning_leaves_the_model_as_found():
    model = tiny_model("gemma3_text")
    before = model.config.to_dict()
    logits = forward(model, tiny_tokens(20)[None])
    plan_geometry(model, longest=400)
    assert model.config.to_dict() == before
    assert torch.equal(forward(model, tiny_tokens(20)[None]), logits)
