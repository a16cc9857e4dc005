import ast
import re
import zipfile
from array import array
from types import SimpleNamespace

import pytest

from kvcq.errors import MismatchError
from kvcq.runtime.sglang import admission
from kvcq.runtime.sglang.store import Prefill, SinkStore
from kvcq.spec.plan import Windows
from tests.runtime.sglang.wheels import wheel

REQ = "sglang.srt.managers.schedule_batch.Req"


@pytest.fixture
def store():
    made = SinkStore(Windows(), rows=5, entries=4)
    admission.uninstall()
    admission.install(made)
    yield made
    admission.uninstall()


def request(row=None, *, name="a", length=1000, prefix=0, **more):
    ids = array("q", range(length))
    made = SimpleNamespace(
        rid=name,
        req_pool_idx=row,
        full_untruncated_fill_ids=ids,
        origin_input_ids=ids,
        output_ids=array("q"),
        prefix_indices=range(prefix),
        extend_range=SimpleNamespace(start=prefix, end=length),
        extra_key=None,
        input_embeds=None,
        positional_embed_overrides=None,
    )
    vars(made).update(more)
    return made


def plain(self, input_len):
    return input_len - 1


def test_a_match_is_capped_only_where_the_host_would_reuse_more(store):
    assert admission.match_cap(plain, request(), 1000) == 0
    admission.sink_bind([1], None, [request(1)])
    store.drain()
    assert admission.match_cap(plain, request(), 1000) == 704
    assert admission.match_cap(lambda self, input_len: 5, request(), 1000) == 5


@pytest.mark.parametrize("generated", [0, 500])
def test_a_request_that_waits_is_known_by_its_prompt_and_what_it_generated(store, generated):
    admission.sink_bind([1], None, [request(1)])
    store.drain()
    ids = array("q", range(1000))
    cut = 1000 - generated
    waiting = request(full_untruncated_fill_ids=ids[:0], origin_input_ids=ids[:cut], output_ids=ids[cut:])
    assert admission.match_cap(plain, waiting, 1000) == 704
    # A retracted one still holds what it had at its last turn.
    waiting = request(full_untruncated_fill_ids=ids[:7], origin_input_ids=ids[:cut], output_ids=ids[cut:])
    assert admission.match_cap(plain, waiting, 1000) == 704


@pytest.mark.parametrize("more", [{"input_embeds": [[0.0]]}, {"positional_embed_overrides": object()}])
def test_requests_whose_tokens_do_not_tell_their_rows_reuse_nothing(store, more):
    admission.sink_bind([1], None, [request(1)])
    store.drain()
    assert admission.match_cap(plain, request(**more), 1000) == 0
    assert admission.prefill(request(2, **more)).private


def test_rows_are_bound_with_a_batch_and_let_go_with_their_request(store):
    batch = [request(1, name="a"), request(2, name="b")]
    assert admission.sink_bind([1, 2], None, batch) is None
    assert store.occupancy.rows == 2
    assert admission.sink_unpin(None, batch[0]) is None
    assert admission.sink_unpin(None, request(None)) is None
    assert store.occupancy.rows == 1
    assert admission.sink_clear(None, None) is None
    assert store.occupancy.rows == 0


def test_a_batch_that_got_no_rows_is_not_bound(store):
    admission.sink_bind(None, None, [request(None)])
    assert store.occupancy.rows == 0


def test_the_end_of_a_chunk_is_read_where_the_release_keeps_it():
    late = request(3, name="c", prefix=128, extra_key="x")
    early = request(3, name="c", prefix=128, extra_key="x", fill_len=1000)
    del early.extend_range
    wanted = Prefill(3, "c", late.full_untruncated_fill_ids, 128, 1000, "x")
    assert admission.prefill(late) == admission.prefill(early) == wanted


def test_a_process_without_a_pool_schedules_nothing_and_one_with_two_does_not_start(store):
    with pytest.raises(MismatchError, match="second pool"):
        admission.install(store)
    admission.uninstall()
    with pytest.raises(MismatchError, match="no pool"):
        admission.match_cap(plain, request(), 1000)


def test_every_release_has_the_fields_of_requests_that_are_read(sources):
    init = sources.function(f"{REQ}.__init__")
    fields = {
        node.attr
        for node in ast.walk(init)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    read = {"rid", "req_pool_idx", "full_untruncated_fill_ids", "prefix_indices", "extra_key", "input_embeds"}
    assert read | {"positional_embed_overrides", "origin_input_ids", "output_ids"} <= fields
    # The end of a chunk: one of the two, never both.
    assert ("extend_range" in fields) != ("fill_len" in fields)
    assert "extend_range" in fields or "extend_range" not in ast.unparse(sources.find(REQ))


def test_every_release_matches_a_prefix_up_to_the_cap(sources):
    body = ast.unparse(sources.function(f"{REQ}.init_next_round_input"))
    assert "self._compute_max_prefix_len(input_len)" in body
    # Either the tokens are cut there, or the match is told to stop there.
    assert "full_untruncated_fill_ids[:self._compute_max_prefix_len(input_len)]" in body or "limit=key_limit" in body


def test_every_release_reuses_the_row_of_a_request_that_goes_on(sources):
    body = ast.unparse(sources.function("sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc"))
    assert "r.req_pool_idx is not None" in body
    assert body.endswith("return [r.req_pool_idx for r in reqs]")
    init = ast.unparse(sources.function("sglang.srt.mem_cache.memory_pool.ReqToTokenPool.__init__"))
    assert "self._alloc_size = size + 1" in init
    assert "self.free_slots = list(range(1, self._alloc_size))" in init


def test_every_release_gives_rows_and_takes_them_back_where_the_hooks_are(sources):
    changed = re.compile(r"\.req_pool_idx = (?!req\.)|req_to_token_pool\.free_slots(\.append| =)")
    with zipfile.ZipFile(wheel(sources.version)) as archive:
        names = [name for name in archive.namelist() if name.startswith("sglang/srt/") and name.endswith(".py")]
        found = {
            name.removeprefix("sglang/srt/")
            for name in names
            if "req_pool_idx" in (text := archive.read(name).decode()) and changed.search(text)
        }
    # The hooked class, and two features that are refused.
    served = {name for name in found if not name.startswith("disaggregation/")}
    assert served == {"mem_cache/memory_pool.py", "session/streaming_session.py"}
    body = ast.unparse(sources.find("sglang.srt.mem_cache.memory_pool.ReqToTokenPool"))
    assert body.count(".req_pool_idx = ") == 2
