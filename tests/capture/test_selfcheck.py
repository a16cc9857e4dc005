from dataclasses import replace

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from kvcq.capture import selfcheck
from kvcq.capture.selfcheck import self_check
from kvcq.errors import InputError, UnsupportedError
from kvcq.models import attention
from kvcq.models.geometry import plan_geometry
from tests.capture.examples import loaded
from tests.tiny import tiny_model, tiny_tokens

TOKENS = tiny_tokens(48)
ACCEPTED = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gpt_oss",
    "granite",
    "smollm3",
    "phi3",
    "stablelm",
    "qwen3_next",
    "gemma3n_text",
    "cohere2",
]


@pytest.mark.parametrize("model_type", ACCEPTED)
def test_supported_types_pass_and_unrotate(model_type):
    source = loaded(model_type)
    geometry = self_check(source, TOKENS)
    assert geometry.model_type == source.model.config.model_type
    assert [layer.kind for layer in geometry.layers] == [layer.kind for layer in source.geometry.layers]
    assert all(layer.unrotates for layer in geometry.quantizable())


def test_layers_without_positions_unrotate_by_identity():
    geometry = self_check(loaded("smollm3"), TOKENS)
    assert geometry.layers[3].rope is None
    assert geometry.layers[3].unrotates


def test_norm_after_rope_keeps_post_rope_statistics_only():
    geometry = self_check(loaded("hunyuan_v1_dense"), TOKENS)
    assert len(geometry.quantizable()) == 4
    assert not any(layer.unrotates for layer in geometry.layers)


def test_the_model_is_left_as_found():
    source = loaded("gemma2")
    model = source.model
    before = model(TOKENS[None]).logits
    config = model.config.to_dict()
    registered = set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)
    implementation = model.config._attn_implementation
    self_check(source, TOKENS)
    assert model.config._attn_implementation == implementation
    assert model.config.to_dict() == config
    assert (set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)) == registered
    assert torch.equal(model(TOKENS[None]).logits, before)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_with_its_own_tolerance(dtype):
    source = loaded("llama")
    source.model.to(dtype)
    assert all(layer.unrotates for layer in self_check(source, TOKENS).layers)


def test_a_layer_with_its_own_softmax_is_refused():
    source = loaded("llama")

    class Own(torch.nn.Module):
        def forward(self, hidden_states, **options):
            return torch.softmax(hidden_states, -1), None

    source.model.model.layers[2].self_attn = Own()
    with pytest.raises(UnsupportedError, match="layer 2") as caught:
        self_check(source, TOKENS)
    assert "\n" not in str(caught.value)


def test_a_call_that_is_not_what_is_cached_is_refused():
    model = tiny_model("diffllama")
    with pytest.raises(UnsupportedError, match="diffllama"):
        self_check(_planned_as_llama(model), TOKENS)
    with pytest.raises(UnsupportedError, match="diffllama"):
        plan_geometry(model)


def test_repeated_heads_are_refused():
    with pytest.raises(UnsupportedError, match="jetmoe"):
        loaded("jetmoe")


def test_captured_values_must_equal_the_cache(monkeypatch):
    source = loaded("llama")
    read = attention._read_call

    def scaled(module, query, key, value, mask, options):
        return read(module, query, key, value if module.layer_idx != 1 else value * (1 + 1e-6), mask, options)

    monkeypatch.setattr(attention, "_read_call", scaled)
    with pytest.raises(UnsupportedError, match=r"captured values are not what the model caches .*layer 1\)"):
        self_check(source, TOKENS)


def test_a_missing_mask_is_refused_with_the_first_layer(monkeypatch):
    source = loaded("llama")

    def sees_the_future(call):
        if call.layer < 2:
            return attention.plain_attention(call)
        return torch.nn.functional.scaled_dot_product_attention(
            call.query, call.key, call.value, scale=call.scaling, enable_gqa=True
        )

    monkeypatch.setattr(selfcheck, "plain_attention", sees_the_future)
    with pytest.raises(UnsupportedError, match=r"differ from the eager model's .*first at layer 2\)") as caught:
        self_check(source, TOKENS)
    assert "\n" not in str(caught.value)


def test_ignored_sinks_are_noticed(monkeypatch):
    source = loaded("gpt_oss")
    for layer in source.model.model.layers:
        layer.self_attn.sinks.fill_(2.0)
    self_check(source, TOKENS)
    real = attention.plain_attention

    def without_sinks(call):
        return real(attention.AttentionCall(call.layer, call.query, call.key, call.value, call.mask, call.scaling))

    monkeypatch.setattr(selfcheck, "plain_attention", without_sinks)
    with pytest.raises(UnsupportedError, match="first at layer 0"):
        self_check(source, TOKENS)


def test_non_finite_logits_are_refused():
    source = loaded("llama")
    source.model.lm_head.weight[3] = float("nan")
    with pytest.raises(UnsupportedError, match="not finite"):
        self_check(source, TOKENS)


@pytest.mark.parametrize(("factor", "told"), [(1.0, 0), (1.7, 1)])
def test_a_loss_above_that_of_random_weights_warns(factor, told):
    source, lines = loaded("llama"), []
    source.model.lm_head.weight *= factor
    self_check(source, TOKENS, warn=lines.append)
    assert ["above the 4.9 of guessing" in line for line in lines] == [True] * told


def test_a_loss_far_above_guessing_stops():
    source = loaded("llama")
    source.model.lm_head.weight *= 100
    with pytest.raises(InputError, match=r"far above the 4.9 of guessing \(model_type llama\).*tokenizer"):
        self_check(source, TOKENS)


def _planned_as_llama(model):
    source = loaded("llama")
    return replace(source, model=model, geometry=source.geometry.model_copy(update={"model_type": "diffllama"}))
