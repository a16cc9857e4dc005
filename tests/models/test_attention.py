from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface, AttentionMaskInterface

from kvcq.errors import UnsupportedError
from kvcq.models import attention
from kvcq.models.attention import AttentionCall, attention_hook, plain_attention
from kvcq.models.library import forward, new_cache
from tests.tiny import tiny_model, tiny_tokens

SUPPORTED = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gpt_oss",
    "granite",
    "phi3",
    "stablelm",
    "cohere2",
    "smollm3",
    "qwen3_next",
    "glm4",
    "olmo2",
    "llama4_text",
    "mimo_v2_flash",
]


def relative(actual, expected):
    return float((actual - expected).norm() / expected.norm())


def eager_logits(model, tokens):
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    logits = forward(model, tokens)
    model.set_attn_implementation(before)
    return logits


def naive(call):
    """Attention in float64, written from the definition, one head at a time."""
    group = call.query.shape[1] // call.key.shape[1]
    visible = call.visible().expand(call.query.shape[0], -1, -1, -1)[:, 0]
    outputs = []
    for head in range(call.query.shape[1]):
        q, k = call.query[:, head].double(), call.key[:, head // group].double()
        scores = q @ k.mT * call.scaling
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        weights = torch.where(visible, scores, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True)
        if call.sinks is not None:
            total = total + call.sinks[head].double().exp()
        outputs.append(weights / total @ call.value[:, head // group].double())
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_hooked_logits_equal_eager_logits_in_one_pass_and_in_chunks(model_type):
    model, tokens = tiny_model(model_type), tiny_tokens(40)[None]
    expected = eager_logits(model, tokens)
    with attention_hook(model, plain_attention):
        assert relative(forward(model, tokens), expected) < 1e-5
        cache = new_cache(model)
        parts = [forward(model, tokens[:, a:b], cache=cache) for a, b in ((0, 19), (19, 39), (39, 40))]
    assert relative(torch.cat(parts, dim=1), expected) < 1e-5


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "gpt_oss", "mimo_v2_flash"])
def test_captured_keys_and_values_are_what_the_cache_holds(model_type):
    model, calls = tiny_model(model_type), {}

    def hook(call):
        calls[call.layer] = call
        return plain_attention(call)

    cache = new_cache(model)
    with attention_hook(model, hook):
        forward(model, tiny_tokens(24)[None], cache=cache)
    for layer, call in calls.items():
        kept = cache.layers[layer]
        assert torch.equal(call.key[:, :, -kept.keys.shape[2] :], kept.keys)
        assert torch.equal(call.value[:, :, -kept.values.shape[2] :], kept.values)


def test_without_the_mask_function_the_model_sees_the_future(monkeypatch):
    """The fault that registering both functions prevents; the other tests fail in the same way without it."""
    model, tokens = tiny_model(), tiny_tokens(40)[None]
    expected = eager_logits(model, tokens)
    monkeypatch.setattr(attention.AttentionMaskInterface, "register", lambda name, function: None)
    masks = []

    def blind(call):
        masks.append(call.mask)
        everything = torch.ones(1, 1, call.query.shape[2], call.key.shape[2], dtype=torch.bool)
        return plain_attention(replace(call, mask=call.mask if call.mask is not None else everything))

    with attention_hook(model, blind):
        assert relative(forward(model, tokens), expected) > 1e-2
    assert masks == [None] * 4


@pytest.mark.parametrize("model_type", ["gemma2", "mistral", "gpt_oss"])
def test_a_window_reaches_the_hook_as_a_mask(model_type):
    """Fails if the mask function is not registered: then every mask is None."""
    model, seen = tiny_model(model_type), []

    def hook(call):
        seen.append((call.window, call.visible()))
        return plain_attention(call)

    with attention_hook(model, hook):
        forward(model, tiny_tokens(40)[None])
    row, column = torch.arange(40)[:, None], torch.arange(40)[None]
    for window, visible in seen:
        expected = column <= row
        if window is not None:
            expected = expected & (column > row - window)
        assert torch.equal(visible[0, 0], expected)
    assert any(window == 16 for window, _ in seen)


def implementations(model):
    return [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_everything_is_restored_also_after_an_exception_and_when_nested(model_type):
    model = tiny_model(model_type)
    before, tables = implementations(model), (list(AttentionInterface()), list(AttentionMaskInterface()))

    def broken(call):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), attention_hook(model, broken):
        forward(model, tiny_tokens(4)[None])
    assert implementations(model) == before
    inner, outer = [], []

    def into(calls):
        return lambda call: (calls.append(call.layer), plain_attention(call))[1]

    with attention_hook(model, into(outer)):
        with attention_hook(model, into(inner)):
            forward(model, tiny_tokens(4)[None])
        forward(model, tiny_tokens(4)[None])
    assert inner == outer == [0, 1, 2, 3]
    assert implementations(model) == before
    assert (list(AttentionInterface()), list(AttentionMaskInterface())) == tables


def test_hooks_of_two_models_do_not_meet():
    one, two, calls = tiny_model(seed=1), tiny_model(seed=2), []
    with (
        attention_hook(one, lambda call: (calls.append("one"), plain_attention(call))[1]),
        attention_hook(two, lambda call: (calls.append("two"), plain_attention(call))[1]),
    ):
        forward(one, tiny_tokens(4)[None])
        forward(two, tiny_tokens(4)[None])
    assert calls == ["one"] * 4 + ["two"] * 4


@pytest.mark.parametrize("keyword", ["indices", "position_bias", "cu_seq_lens_q", "made_up"])
def test_an_unknown_keyword_is_refused_by_name_and_layer(keyword):
    model = tiny_model()
    with attention_hook(model, plain_attention), pytest.raises(UnsupportedError, match=rf"'{keyword}' \(layer 0\)"):
        model(tiny_tokens(4)[None], **{keyword: torch.zeros(1)})


def test_an_unknown_keyword_that_is_none_is_harmless():
    model = tiny_model()
    with attention_hook(model, plain_attention):
        model(tiny_tokens(4)[None], made_up=None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m.model.layers[1].self_attn, "is_causal", False), "not causal"),
        (lambda m: (m.train(), setattr(m.model.layers[0].self_attn, "attention_dropout", 0.5)), "dropout"),
        (lambda m: setattr(m.model.layers[2].self_attn, "layer_idx", None), "layer id"),
    ],
)
def test_calls_that_break_the_contract_are_refused(change, reason):
    model = tiny_model()
    change(model)
    with attention_hook(model, plain_attention), pytest.raises(UnsupportedError, match=reason):
        model(tiny_tokens(4)[None], use_cache=False)


@pytest.mark.parametrize("model_type", ["falcon", "bloom", "mpt", "doge"])
def test_models_with_their_own_attention_or_mask_are_refused_in_one_line(model_type, capfd):
    model = tiny_model(model_type)
    before = implementations(model)
    capfd.readouterr()
    with pytest.raises(UnsupportedError) as refusal, attention_hook(model, plain_attention):
        forward(model, tiny_tokens(4)[None])
    assert "\n" not in str(refusal.value)
    assert implementations(model) == before
    assert capfd.readouterr().err == ""


def test_what_is_no_transformers_model_is_refused():
    with pytest.raises(UnsupportedError, match="Linear"), attention_hook(torch.nn.Linear(2, 2), plain_attention):
        pass


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    queries=st.integers(1, 9),
    history=st.integers(0, 9),
    wide=st.booleans(),
    form=st.sampled_from(["none", "bool", "additive"]),
    softcap=st.sampled_from([None, 1.5]),
    sinks=st.booleans(),
    seed=st.integers(0, 9),
)
def test_plain_attention_is_attention(batch, kv_heads, group, queries, history, wide, form, softcap, sinks, seed):
    torch.manual_seed(seed)
    keys, dims = queries + history, 8
    call = AttentionCall(
        layer=0,
        query=torch.randn(batch, kv_heads * group, queries, dims),
        key=torch.randn(batch, kv_heads, keys, dims),
        value=torch.randn(batch, kv_heads, keys, dims + 4 * wide),
        mask=None,
        scaling=0.7,
        softcap=softcap,
        sinks=torch.randn(kv_heads * group) if sinks else None,
    )
    if form != "none":
        mask = (torch.rand(batch, 1, queries, keys) < 0.6) & call.visible()
        mask[..., 0] = True
        if form == "additive":
            mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        call = replace(call, mask=mask)
    torch.testing.assert_close(plain_attention(call), naive(call).float(), rtol=1e-4, atol=1e-5)


def test_long_exact_attention_is_computed_in_blocks_without_a_seam():
    torch.manual_seed(0)
    length = attention.QUERY_BLOCK + 40
    query, key, value = torch.randn(1, 2, length, 8), torch.randn(1, 1, length, 8), torch.randn(1, 1, length, 8)
    capped = AttentionCall(layer=0, query=query, key=key, value=value, mask=None, scaling=0.3, softcap=1e6)
    plain = AttentionCall(layer=0, query=query, key=key, value=value, mask=None, scaling=0.3)
    torch.testing.assert_close(plain_attention(capped), plain_attention(plain), rtol=1e-3, atol=1e-4)


def test_the_output_of_a_hook_may_have_a_higher_precision_than_the_model():
    model = tiny_model().to(torch.bfloat16)
    with attention_hook(model, lambda call: plain_attention(call).double()):
        assert forward(model, tiny_tokens(4)[None]).dtype == torch.bfloat16
