"""Filled contexts on the real radix tree of every release: found, owned by nobody twice, off unless asked for."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import random
import sys
import types
from array import array
from types import SimpleNamespace

import pytest
import torch

from kvcq.codecs.packing import page_views
from kvcq.runtime.layout import page_bytes
from kvcq.runtime.sglang import filled, plugin, settings, versions
from kvcq.runtime.sglang.filled import Filler, asked, fill_pages, fill_pool
from kvcq.runtime.sglang.store import Prefill, SinkStore
from kvcq.spec.codec import CodecSpec
from kvcq.spec.plan import Windows
from tests.runtime.sglang import small
from tests.runtime.sglang.wheels import Sources, wheel

ON = '{"kvcq_bench": {"filled": true}}'
HOME = "sglang.srt.mem_cache"
REAL = tuple(
    f"{HOME}.{name}"
    for name in (
        "radix_cache",
        "base_prefix_cache",
        "utils",
        "evict_policy",
        "cache_init_params",
        "events",
        "session_radix_cache",
    )
)


class StandIn(types.ModuleType):
    """A module that has every name, each an empty class."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__class_getitem__": classmethod(lambda cls, item: cls)})
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the tree in a wheel, and stand-ins for everything else of SGLang."""

    def __init__(self, sources):
        self.sources = sources

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "sglang":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=name not in REAL)

    def create_module(self, spec):
        return None if spec.name in REAL and self.sources.has(spec.name) else StandIn(spec.name)

    def exec_module(self, module):
        if module.__name__ in REAL and self.sources.has(module.__name__):
            exec(compile(self.sources.text(module.__name__), module.__name__, "exec"), module.__dict__)  # noqa: S102


@pytest.fixture
def tree_modules(sources, monkeypatch):
    """The modules of the tree as `filled` imports them."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    finder = Finder(sources)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    importlib.import_module(f"{HOME}.radix_cache")
    yield sources
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


class Allocator:
    """``TokenToKVPoolAllocator`` with pages, as far as a tree asks."""

    def __init__(self, tokens, page, pool):
        self.page, self.pool, self.device = page, pool, torch.device("cpu")
        self.pages = list(range(1, tokens // page + 1))

    def available_size(self):
        return len(self.pages) * self.page

    def get_kvcache(self):
        return self.pool

    def alloc(self, need):
        assert need % self.page == 0
        taken, self.pages = self.pages[: need // self.page], self.pages[need // self.page :]
        return (torch.tensor(taken, dtype=torch.int64)[:, None] * self.page + torch.arange(self.page)).flatten()

    def free(self, slots):
        pages = (slots // self.page).unique().tolist()
        assert not set(pages) & set(self.pages)
        self.pages += pages

    def free_segment(self, slots, *, start_pos):
        self.free(slots)


class BfPool:
    def __init__(self, tokens):
        rows = tokens + 64
        self.k_buffer = [torch.zeros(rows, 2, 16, dtype=torch.bfloat16) for _ in range(2)]
        self.v_buffer = [torch.zeros(rows, 2, 16, dtype=torch.bfloat16) for _ in range(2)]


class Fills:
    """A scheduler's tree, and the filler before it."""

    def __init__(self, tokens, page=64, store=None, overrides=ON):
        home = sys.modules[f"{HOME}.radix_cache"]
        self.pool, self.total, self.page, self.store = BfPool(tokens), tokens, page, store
        self.allocator = Allocator(tokens, page, self.pool)
        self.tree = home.RadixCache.create_simulated(mock_allocator=self.allocator, page_size=page)
        self.home, self.filler = home, Filler()
        sys.modules["sglang.srt.server_args"] = types.SimpleNamespace(
            get_global_server_args=lambda: SimpleNamespace(json_model_override_args=overrides)
        )

    def ask(self, ids, wanted, new=16):
        params = SimpleNamespace(custom_params={"kvcq_filled": wanted, "__req__": object()}, max_new_tokens=new)
        req = SimpleNamespace(origin_input_ids=array("q", ids), sampling_params=params, extra_key=None)
        self.filler.before(req, self.tree, self.store)
        return self.match(ids)

    def match(self, ids):
        base = sys.modules[f"{HOME}.base_prefix_cache"]
        key = self.home.RadixKey(array("q", ids), None)
        return self.tree.match_prefix(base.MatchPrefixParams(key=key))

    def check(self):
        """Every token of the pool is free or in the tree, once."""
        held = self.tree.all_values_flatten().tolist() if self.tree.total_size() else []
        assert len(set(held)) == len(held)
        free = {page * self.page + place for page in self.allocator.pages for place in range(self.page)}
        assert not free & set(held) and len(free) + len(held) == self.total
        assert self.tree.evictable_size() + self.tree.protected_size() == len(held)


def prompt(seed, length):
    draw = random.Random(seed)
    return [seed, *(draw.randrange(256) for _ in range(length - 1))]


@pytest.mark.parametrize("page", [1, 64])
def test_a_filled_prompt_is_found_and_shares_nothing(tree_modules, page):
    fills = Fills(4096, page)
    found = [fills.ask(prompt(n, 700), 448).device_indices for n in (1, 2, 3)]
    assert [len(slots) for slots in found] == [448] * 3
    assert len(set(torch.cat(found).tolist())) == 3 * 448
    fills.check()
    # Asked again it is there already: of a request that could not be scheduled at once.
    again = fills.ask(prompt(2, 700), 448).device_indices
    assert again.tolist() == found[1].tolist()
    fills.check()
    assert all(rows.float().std() > 0.5 for rows in (*fills.pool.k_buffer, *fills.pool.v_buffer))


def test_where_there_is_no_room_nothing_is_placed_and_what_nobody_holds_gives_way(tree_modules):
    fills = Fills(960)
    first = fills.ask(prompt(1, 600), 512)
    fills.tree.inc_lock_ref(first.last_device_node)
    assert len(fills.ask(prompt(2, 600), 512).device_indices) == 0
    fills.check()
    fills.tree.dec_lock_ref(first.last_device_node)
    assert len(fills.ask(prompt(2, 600), 512).device_indices) == 512
    assert len(fills.match(prompt(1, 600)).device_indices) < 512
    fills.check()


def test_a_prompt_that_shares_its_beginning_keeps_it(tree_modules):
    fills = Fills(4096, 1)
    a = prompt(1, 700)
    b = [*a[:100], *prompt(2, 600)]
    one = fills.ask(a, 448).device_indices
    two = fills.ask(b, 448).device_indices
    assert two[:100].tolist() == one[:100].tolist() and len(two) == 448
    fills.check()


@pytest.mark.parametrize("overrides", ["{}", None, '{"kvcq_bench": {"filled": 1}}', "[]", '{"kvcq": {}}', "{"])
def test_a_server_that_was_not_started_for_it_fills_nothing(tree_modules, overrides):
    fills = Fills(4096, overrides=overrides)
    assert len(fills.ask(prompt(1, 700), 448).device_indices) == 0 and not asked(settings.overrides(overrides))
    assert not fills.pool.k_buffer[0].any()
    fills.check()


@pytest.mark.parametrize("wanted", [None, "448", True, -5, 63, [448]])
def test_what_is_no_number_of_tokens_fills_nothing(tree_modules, wanted):
    fills = Fills(4096)
    assert len(fills.ask(prompt(1, 700), wanted).device_indices) == 0
    fills.check()


def test_sinks_of_a_filled_prompt_are_found_by_the_store(tree_modules):
    held = SinkStore(Windows(sink=64, recent=256), 5, 4)
    fills, ids = Fills(8192, store=held), prompt(1, 900)
    assert held.cap(900, ids) == 0
    fills.ask(ids, 640)
    assert held.cap(900, ids) == 640
    held.bind([Prefill(1, "r1", ids, 640, 900)])
    moves = held.drain()
    assert len(moves.restore) == 1 and moves.restore[0][1] == 1 and moves.exact_from == ((1, 640),)
    # As many as there are entries stay found, whatever comes.
    for seed in range(2, 9):
        fills.ask(prompt(seed, 900), 640)
    assert [held.cap(900, prompt(seed, 900)) for seed in range(5, 9)] == [640] * 4
    held.check()


def test_the_hook_takes_what_the_function_has(sources):
    assert sources.parameters(filled.TARGET)[:2] == ["self", "tree_cache"]


def test_the_fields_that_a_request_needs_are_there(sources: Sources):
    assert wheel(sources.version).is_file()
    names = sources.text("sglang.srt.sampling.sampling_params")
    assert "custom_params" in names and "stream_interval" in names
    assert "def get_global_server_args" in sources.text("sglang.srt.server_args")


@pytest.mark.parametrize("dims", [(128, 128), (64, 96)])
@pytest.mark.parametrize("groups", [1, 4])
def test_filled_pages_have_finite_scales_and_all_codes(dims, groups):
    side = CodecSpec(groups=groups)
    pages = torch.zeros(5, 2, page_bytes(side, side, *dims), dtype=torch.uint8)
    fill_pages(pages, *dims)
    k, v, words = page_views(pages, *dims, groups)
    assert words.isfinite().all()
    assert (words[..., 0] >= 0.37).all() and (words[..., 0] <= 0.63).all()
    assert torch.allclose(words[..., 1].float(), -1.5 * words[..., 0].float(), atol=2e-3)
    assert len(k.unique()) == len(v.unique()) == 256


def test_the_plugin_asks_the_filler_of_its_process(monkeypatch):
    process, told = plugin._Process(), []
    monkeypatch.setattr(plugin, "_PROCESS", process)
    monkeypatch.setattr(process.filler, "before", lambda *given: told.append(given))
    assert plugin.fill("req", "tree", cow_mamba=None) is None
    assert plugin.fill("req", tree_cache="tree") is None and plugin.fill("req") is None
    process.pools.append(SimpleNamespace(store="store"))
    plugin.fill("req", "tree")
    assert told == [("req", "tree", None)] * 2 + [("req", None, None), ("req", "tree", "store")]


def test_the_hook_is_registered_beside_those_that_serving_rests_on(monkeypatch):
    host = small.install(monkeypatch, "0.5.15.post1")
    monkeypatch.setattr(versions, "installed", lambda: "0.5.15.post1")
    plugin.activate()
    assert (filled.TARGET, plugin.fill, small.HookType.BEFORE) in host.registry.hooks
    assert "fill" not in plugin.FUNCTIONS


def test_a_pool_of_another_kind_is_not_filled():
    with pytest.raises(TypeError, match="SimpleNamespace"):
        fill_pool(SimpleNamespace())
