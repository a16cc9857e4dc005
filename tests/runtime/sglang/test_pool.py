import abc
import ast
import inspect
import logging
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from kvcq.errors import MismatchError, UnsupportedError
from kvcq.runtime.layout import kv_bytes_per_token
from kvcq.runtime.sglang.configurator import pool_plan
from kvcq.runtime.sglang.pool import check_pool, make_pool_class
from kvcq.runtime.sglang.store import Prefill
from kvcq.runtime.sglang.versions import adapter
from kvcq.spec.plan import Windows
from tests.runtime.sglang.real import definitions
from tests.runtime.sglang.test_configurator import geometry, layer_plans

MODULE = "sglang.srt.mem_cache.memory_pool"
MODEL = geometry(layers=3, kv_heads=2, d=32)
WINDOWS = Windows(sink=8, recent=16)
BUILDERS = {
    "mixin": ("sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin._init_pools", "pool_cls"),
    "configurator": ("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mha_kv_pool", "pool_cls"),
}
# What SGLang passes, where it is not the model's shape.
GIVEN = {
    "page_size": 64,
    "dtype": torch.bfloat16,
    "device": "cpu",
    "enable_memory_saver": False,
    "enable_alt_stream": True,
    "enable_kv_cache_copy": False,
}


def plan(**more):
    return pool_plan(layer_plans(MODEL), MODEL, WINDOWS, digest="d" * 64, tp=1, requests=3, **more)


@pytest.fixture
def base(sources, monkeypatch):
    """The real base class of a release, with stand-ins for what its constructor calls."""
    saver = SimpleNamespace(create=lambda enable: None)
    scope = {
        "abc": abc,
        "torch": torch,
        "logger": logging.getLogger(__name__),
        "GB": 1 << 30,
        "TorchMemorySaverAdapter": saver,
        "maybe_init_custom_mem_pool": lambda device: (False, None, None),
    }
    found = definitions(sources, MODULE, ("KVCache",), scope)
    monkeypatch.setitem(sys.modules, MODULE, types.SimpleNamespace(**found))
    return found["KVCache"]


def build(made=None, **change):
    shape = {"head_num": 2, "head_dim": 32, "v_head_dim": 32, "layer_num": 3, "start_layer": 0, "end_layer": 3}
    return (made or make_pool_class(plan(), torch.float32))(640, **(GIVEN | shape | change))


def test_bytes_of_a_token_in_the_allocated_tensors_are_those_of_the_layout(base):
    pool = build()
    assert isinstance(pool, base)
    assert pool.bytes_per_token == kv_bytes_per_token(layer_plans(MODEL), MODEL) == plan().cell
    assert [tuple(pages.shape) for pages in pool.pages] == [(11, 2, 64 * 24)] * 3
    assert pool.get_kv_size_bytes() == sum(pages.nbytes for pages in pool.pages) + pool.windows.nbytes
    assert pool.mem_usage == pool.get_kv_size_bytes() / 2**30


def test_bf16_pools_allocate_exactly_what_the_plan_says(base):
    pool = build(make_pool_class(plan()))
    assert pool.get_kv_size_bytes() == 640 * plan().cell + plan().bias


def test_the_pool_has_the_members_that_schedulers_read(base):
    pool = build()
    read = {
        "size": 640,
        "page_size": 64,
        "dtype": torch.uint8,
        "store_dtype": torch.uint8,
        "layer_num": 3,
        "start_layer": 0,
        "head_num": 2,
        "head_dim": 32,
        "v_head_dim": 32,
        "device": "cpu",
    }
    assert {name: getattr(pool, name) for name in read} == read
    assert pool.maybe_get_custom_mem_pool() is None
    assert not getattr(pool, "post_capture_active", False)


def test_caches_are_by_layer_id_also_in_a_later_stage_of_a_pipeline(base):
    pool = build(make_pool_class(plan(), torch.float32), layer_num=2, start_layer=1, end_layer=3)
    assert list(pool.caches) == [1, 2]
    assert pool.caches[2].pages is pool.pages[1]
    assert pool.bytes_per_token == plan().stage(1, 3).cell


def test_sinks_of_a_request_reach_the_next_one_through_settle(base):
    pool, ids = build(), list(range(200))
    pool.store.bind([Prefill(1, "a", ids, 0, 200)])
    pool.settle()
    for cache in pool.caches.values():
        cache.sink_k[1], cache.sink_v[1] = 3, 4
    pool.store.release(1)
    pool.store.bind([Prefill(2, "b", ids, 128, 200)])
    pool.settle()
    for cache in pool.caches.values():
        assert (cache.sink_k[2] == 3).all()
        assert (cache.sink_v[2] == 4).all()
    assert pool.windows.exact_from.tolist() == [0, 0, 128, 0]


def test_every_method_that_hands_out_or_moves_rows_refuses(sources, base):
    pool = build()
    public = {node.name for node in sources.find(f"{MODULE}.KVCache").body if isinstance(node, ast.FunctionDef)}
    kept = {"__init__", "_finalize_allocation_log", "maybe_get_custom_mem_pool", "get_kv_cache_quant_method"}
    refused = public - kept | {"move_kv_cache", "get_contiguous_buf_infos"}
    for name in refused:
        method = getattr(pool, name)
        arguments = [0] * len([p for p in inspect.signature(method).parameters.values() if p.kind != p.VAR_KEYWORD])
        with pytest.raises(UnsupportedError, match=f"{name}: a pool of 2-bit pages"):
            method(*arguments)


def test_the_pool_takes_every_argument_that_the_release_passes(sources, base):
    target, name = BUILDERS[adapter(sources.version)]
    calls = [call for call in sources.calls(target, name) if any(key.arg == "v_head_dim" for key in call.keywords)]
    assert calls, f"{target} of SGLang {sources.version} builds no pool"
    accepted = inspect.signature(make_pool_class(plan()).__init__).parameters
    for call in calls:
        assert len(call.args) == 1
        assert {key.arg for key in call.keywords if key.arg} <= set(accepted)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"enable_memory_saver": True}, "--enable-memory-saver"),
        ({"enable_kv_cache_copy": True}, "speculative"),
        ({"post_capture_active": True}, "after graph capture"),
        ({"quant_method": object()}, "quant_method"),
    ],
)
def test_features_that_move_or_resize_pools_are_refused(base, change, told):
    with pytest.raises(UnsupportedError, match=told):
        build(**change)


def test_pools_of_another_shape_are_refused(base):
    for change in ({"head_num": 4}, {"head_dim": 64}, {"page_size": 1}):
        with pytest.raises(MismatchError):
            build(**change)
    with pytest.raises(UnsupportedError, match="641 tokens"):
        make_pool_class(plan())(
            641, head_num=2, head_dim=32, v_head_dim=32, layer_num=3, start_layer=0, end_layer=3, **GIVEN
        )


def test_a_runner_with_another_pool_bundle_or_size_is_refused(base):
    pool, cell = build(), plan().cell
    check_pool(pool, "d" * 64, cell, 4)
    with pytest.raises(MismatchError, match="tokens would be kept in BF16"):
        check_pool(SimpleNamespace(), "d" * 64, cell, 4)
    with pytest.raises(MismatchError, match="made for bundle dddddddddddd, attention for eeeeeeeeeeee"):
        check_pool(pool, "e" * 64, cell, 4)
    with pytest.raises(MismatchError, match=f"{cell} bytes of the pool, by the bundle 9"):
        check_pool(pool, "d" * 64, 9, 4)
    with pytest.raises(MismatchError, match="has 5 rows, exact rows are for 4"):
        check_pool(pool, "d" * 64, cell, 5)
