import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcq.errors import InputError, MismatchError, ResourceError, UnsupportedError
from kvcq.runtime.layout import BF16_BYTES, kv_bytes_per_token, window_bytes
from kvcq.runtime.sglang.configurator import check_host, make_configurator, pool_plan
from kvcq.spec.codec import CodecSpec
from kvcq.spec.geometry import LayerGeometry, ModelGeometry
from kvcq.spec.plan import LayerPlan, Windows
from tests.runtime.sglang.real import definitions

WINDOWS = Windows()
INT2 = CodecSpec(transform="orthogonal")


def geometry(layers=36, kv_heads=8, d=128, **more):
    each = {"kind": "full", "q_heads": 4 * kv_heads, "kv_heads": kv_heads, "d_k": d, "d_v": d} | more
    return ModelGeometry(
        model_type="qwen3",
        hidden_size=4096,
        vocab_size=151936,
        layers=tuple(LayerGeometry(layer=index, **each) for index in range(layers)),
    )


def layer_plans(model, k=INT2, v=INT2):
    return tuple(LayerPlan(layer=layer.layer, k=k, v=v) for layer in model.layers)


def planned(model=None, *, tp=1, requests=64, entries=None, windows=WINDOWS, codec=INT2):
    model = model or geometry()
    return pool_plan(
        layer_plans(model, codec, codec), model, windows, digest="d" * 64, tp=tp, requests=requests, entries=entries
    )


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(("kv_heads", "d"), [(8, 128), (2, 64), (5, 80)])
def test_a_token_takes_the_bytes_of_the_layout(kv_heads, d, groups):
    model, codec = geometry(layers=7, kv_heads=kv_heads, d=d), CodecSpec(groups=groups)
    plan = planned(model, codec=codec)
    assert plan.cell == kv_bytes_per_token(layer_plans(model, codec, codec), model)
    assert plan.request_bytes == window_bytes(layer_plans(model, codec, codec), model, WINDOWS)


def test_ranks_share_the_bytes_of_a_token_and_repeat_heads_where_they_are_more():
    whole = planned()
    assert planned(tp=4).cell * 4 == whole.cell
    assert planned(tp=4).request_bytes * 4 == whole.request_bytes
    assert planned(tp=16).cell * 8 == whole.cell


def test_layers_of_two_codecs_take_what_each_of_them_does():
    model = geometry(layers=2)
    plans = (LayerPlan(layer=0, k=INT2, v=INT2), LayerPlan(layer=1, k=CodecSpec(groups=4), v=INT2))
    plan = pool_plan(plans, model, WINDOWS, digest="d", tp=1, requests=1)
    assert plan.blocks == (64 * 72, 64 * 96)
    assert plan.cell == 8 * (72 + 96)
    assert plan.stage(1, 2).cell == 8 * 96


def test_qwen3_8b_holds_six_and_a_half_times_the_tokens_of_bf16_in_the_same_memory():
    # One H200 at SGLang's usual share, 16 GB of weights, 64 running requests and as many kept sinks.
    plan = planned()
    assert plan.cell == 36 * 8 * 144 // 2
    bf16 = 36 * 8 * 256 * BF16_BYTES
    available = int(139 * 2**30 * 0.88) - 16_400_000_000
    assert plan.tokens(available) / (available // bf16) >= 6.5
    # Without the exact rows it would be the ratio of the bytes.
    assert bf16 / plan.cell == pytest.approx(7.11, abs=0.01)


@given(
    available=st.integers(0, 2**38),
    requests=st.integers(1, 256),
    entries=st.integers(0, 512),
    layers=st.integers(1, 40),
    sink=st.sampled_from([0, 64, 100]),
)
def test_what_is_planned_is_whole_pages_that_fit_and_one_more_would_not(available, requests, entries, layers, sink):
    plan = planned(geometry(layers=layers), requests=requests, entries=entries, windows=Windows(sink=sink, recent=256))
    try:
        tokens = plan.tokens(available)
    except ResourceError:
        assert available < plan.bias + 64 * plan.cell
        return
    assert tokens % 64 == 0
    assert tokens * plan.cell + plan.bias <= available < (tokens + 64) * plan.cell + plan.bias


def test_too_little_memory_names_the_flags_and_the_numbers():
    with pytest.raises(ResourceError, match=r"64 running requests take .* GiB .*max-running-requests") as error:
        planned().tokens(2**30)
    assert error.value.exit_code == 6


@pytest.mark.parametrize("requests", [None, 0])
def test_running_requests_must_be_given(requests):
    with pytest.raises(InputError, match="--max-running-requests 64"):
        planned(requests=requests)


def test_as_many_sinks_are_kept_as_requests_run_unless_told_otherwise():
    assert planned(requests=7).entries == 7
    assert planned(entries=3).entries == 3
    with pytest.raises(InputError, match="-1 entries"):
        planned(entries=-1)


@pytest.mark.parametrize(
    ("model", "plans", "told"),
    [
        (geometry(2, kind="sliding", window=64), None, "not sliding"),
        (geometry(2), (LayerPlan(layer=0, k=INT2, v=INT2), LayerPlan(layer=1, reason="skipped")), "BF16"),
        (geometry(2), (LayerPlan(layer=0, k=INT2, v=INT2),), "BF16"),
        (geometry(1), (LayerPlan(layer=0, k=CodecSpec(metadata="fp32-zero"), v=INT2),), "no page holds it"),
    ],
)
def test_layers_that_pages_do_not_hold_are_refused_by_number(model, plans, told):
    with pytest.raises(UnsupportedError, match=rf"{told}.*layer \d.*--engine hf"):
        pool_plan(plans or layer_plans(model), model, WINDOWS, digest="d", tp=1, requests=1)


def test_layers_with_different_heads_are_refused():
    model = geometry(2)
    odd = model.model_copy(update={"layers": (model.layers[0], model.layers[1].model_copy(update={"d_k": 64}))})
    with pytest.raises(UnsupportedError, match=r"\(8, 64, 128\) beside \(8, 128, 128\).*layer 1"):
        pool_plan(layer_plans(odd), odd, WINDOWS, digest="d", tp=1, requests=1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"page_size": 1}, "--page-size"),
        ({"heads": 4}, "KV heads"),
        ({"dims": (64, 64)}, "head dims"),
        ({"layers": 35}, "layers"),
    ],
)
def test_a_host_of_another_model_is_refused(change, told):
    fits = {"page_size": 64, "heads": 8, "dims": (128, 128), "layers": 36}
    check_host(planned(), **fits)
    with pytest.raises(MismatchError, match=told):
        check_host(planned(), **(fits | change))


def test_every_release_takes_its_pool_sizes_from_the_plan(sources, monkeypatch):
    module = "sglang.srt.model_executor.pool_configurator"
    base = definitions(sources, module, ("MemoryPoolConfig", "MemoryPoolConfigurator"))
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**base))
    plan = planned()
    made = make_configurator(plan)
    assert isinstance(made, base["MemoryPoolConfigurator"])
    available = 100 * 2**30
    config = made.calculate_pool_sizes(available, 64)
    assert config.max_total_num_tokens == plan.tokens(available)
    assert made.calculate_pool_sizes_from_max_tokens(1000, 64).max_total_num_tokens == 960
    if hasattr(base["MemoryPoolConfigurator"], "finalize_with_max_running_requests"):
        assert made.finalize_with_max_running_requests(config) is config
    for method in (made.calculate_pool_sizes, made.calculate_pool_sizes_from_max_tokens):
        with pytest.raises(MismatchError, match="pages of 1 tokens"):
            method(available, 1)


def test_every_release_asks_the_configurator_for_nothing_else(sources):
    methods = {"calculate_pool_sizes", "calculate_pool_sizes_from_max_tokens", "finalize_with_max_running_requests"}
    base = sources.find("sglang.srt.model_executor.pool_configurator.MemoryPoolConfigurator")
    # Releases before 0.5.15 have no third one.
    assert {node.name for node in base.body if hasattr(node, "args")} <= methods
