"""A prefix hit after its first owner's row went to another: pool, store and kernels together, held to the replay."""

import abc
import logging
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from kvcq.models.geometry import plan_geometry
from kvcq.runtime.sglang.configurator import pool_plan
from kvcq.runtime.sglang.pool import make_pool_class
from kvcq.runtime.sglang.store import Prefill
from kvcq.runtime.sglang.versions import TESTED
from kvcq.spec.boundary import Boundary
from kvcq.spec.plan import LayerPlan
from tests.runtime.hf.setup import PAIRS, WINDOWS, relative
from tests.runtime.sglang.real import definitions
from tests.runtime.sglang.stage import PAGE, Stage, served
from tests.runtime.sglang.test_session import attention_of, draw, replay, tables_of
from tests.runtime.sglang.wheels import Sources
from tests.tiny import tiny_model

MODULE = "sglang.srt.mem_cache.memory_pool"
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run in Triton's interpreter here")


class PoolStage(Stage):
    """Requests on a real pool: the store finds sinks, the pool brings them."""

    def __init__(self, pool, layers) -> None:
        super().__init__(layers, WINDOWS, rows=pool.plan.requests)
        self.pool, self.caches, self.exact_from = pool, pool.caches, pool.windows.exact_from

    def reuse(self, request, donor_pages, shared):
        """Take a prefix from the cache, as a radix tree hands it out: slots, and nothing of exact rows."""
        request.pages, request.stored = donor_pages[: shared // PAGE], shared
        slots = torch.tensor(request.pages)[:, None] * PAGE + torch.arange(PAGE)
        self.req_to_token[request.row, :shared] = slots.flatten().int()

    def extend(self, parts, padding=0):
        batch = []
        for request, count in parts:
            ids = request.tokens[:-2].tolist()
            batch.append(Prefill(request.row, str(id(request)), ids, request.stored, request.stored + count))
        self.pool.store.bind(batch)
        self.pool.settle()
        return super().extend(parts, padding)

    def leave(self, request):
        self.pool.store.release(request.row)
        self._rows.append(request.row)


@pytest.fixture
def pool_class(monkeypatch):
    scope = {
        "abc": abc,
        "torch": torch,
        "logger": logging.getLogger(__name__),
        "TorchMemorySaverAdapter": SimpleNamespace(create=lambda enable: None),
        "maybe_init_custom_mem_pool": lambda device: (False, None, None),
    }
    found = definitions(Sources(TESTED), MODULE, ("KVCache",), scope)
    monkeypatch.setitem(sys.modules, MODULE, types.SimpleNamespace(**found))

    def made(model, pair):
        geometry = plan_geometry(model)
        layers = geometry.quantizable()
        plans = [LayerPlan(layer=layer.layer, k=pair[0], v=pair[1]) for layer in layers]
        plan = pool_plan(plans, geometry, WINDOWS, digest="d", tp=1, requests=2, entries=2)
        return make_pool_class(plan, torch.float32)(
            16 * PAGE, PAGE, torch.float32, layers[0].kv_heads, layers[0].d_k, len(layers), "cpu", False
        )

    return made


def test_a_hit_whose_first_owner_is_gone_answers_as_the_replay_of_a_cached_boundary(pool_class, pair="int2"):
    model = tiny_model("llama", num_hidden_layers=2, num_key_value_heads=1)
    first = draw(93, 1)
    second, third = torch.cat([first[:PAGE], draw(27, 2)]), draw(34, 3)
    pool = pool_class(model, PAIRS[pair])
    stage = PoolStage(pool, tables_of(model, *PAIRS[pair]))
    found = []
    with served(model, attention_of(stage, model, 2)) as answer:
        a = stage.admit(first)
        answer(stage.extend([(a, 91)]))
        pages, row = a.pages, a.row
        stage.leave(a)
        assert pool.store.cap(89, second[:89].tolist()) == PAGE
        # Its row is another's at once, whose prefill overwrites sinks and ring.
        c = stage.admit(third)
        assert c.row == row
        answer(stage.extend([(c, 32)]))
        b = stage.admit(second)
        stage.reuse(b, pages, PAGE)
        found.append(answer(stage.extend([(b, 25)])))
        found.append(answer(stage.decode([c, b]))[1:])
    wanted = replay(model, second[:90], 89, (Boundary(64, "cached"),), pair)[64:]
    assert relative(torch.cat(found), wanted) < 2e-3
