from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcq.errors import MismatchError
from kvcq.runtime.sglang.store import Moves, Prefill, SinkStore
from kvcq.spec.plan import Windows

WINDOWS = Windows(sink=64, recent=256)


def store(entries=4, rows=9, windows=WINDOWS):
    return SinkStore(windows, rows, entries)


def tokens(seed, length=1000):
    return array("q", [seed] * 8 + list(range(length - 8)))


def cold(row, ids, *, end=None, name=None, **more):
    return Prefill(row, name or f"r{row}", ids, 0, len(ids) if end is None else end, **more)


def warm(row, ids, prefix, *, name=None, **more):
    return Prefill(row, name or f"r{row}", ids, prefix, len(ids), **more)


def forward(held, *batch):
    held.bind(batch)
    return held.drain()


def test_a_prompt_may_be_reused_in_whole_pages_but_for_its_last_window():
    held, ids = store(), tokens(1)
    forward(held, cold(1, ids))
    for length in (320, 321, 500, 680, 1000):
        assert held.cap(length, ids) == (length - 256) // 64 * 64
    assert held.cap(680, ids) == 384


def test_a_prompt_shorter_than_both_windows_never_hits():
    held, ids = store(), tokens(1)
    forward(held, cold(1, ids))
    assert [held.cap(length, ids) for length in (0, 63, 64, 319)] == [0, 0, 0, 0]


def test_nothing_is_reused_before_the_forward_that_computes_the_sinks_has_been_started():
    held, ids = store(), tokens(1)
    assert held.cap(1000, ids) == 0
    held.bind([cold(1, ids)])
    assert held.cap(1000, ids) == 0
    held.drain()
    assert held.cap(1000, ids) == 704


def test_sinks_are_copied_before_the_next_prefill_and_never_before_their_own_forward():
    held, ids = store(), tokens(1)
    assert forward(held, cold(1, ids)) == Moves(exact_from=((1, 0),))
    # The backend may prepare one forward twice.
    assert held.drain() == Moves()
    second = forward(held, warm(2, ids, 640))
    assert second.keep == ((1, 0),)
    assert second.restore == ((0, 2),)
    assert second.exact_from == ((2, 640),)
    assert forward(held) == Moves()


def test_a_row_given_to_another_request_still_hands_over_the_sinks_it_computed():
    held, ids = store(), tokens(1)
    forward(held, cold(1, ids, name="a"))
    held.release(1)
    assert forward(held, warm(1, ids, 640, name="b")) == Moves(((1, 0),), ((0, 1),), ((1, 640),))


def test_a_batch_is_pending_until_its_copies_are_asked_for():
    held = store()
    assert not held.pending
    held.bind([cold(1, tokens(1))])
    assert held.pending
    held.drain()
    assert not held.pending
    held.bind([cold(2, tokens(2))])
    held.clear()
    assert not held.pending


def test_a_request_is_bound_once_whatever_its_chunks():
    held, ids = store(), tokens(1)
    assert forward(held, cold(3, ids, end=512)).exact_from == ((3, 0),)
    later = forward(held, Prefill(3, "r3", ids, 512, 1000))
    assert later == Moves(keep=((3, 0),))
    assert held.occupancy.rows == 1
    held.release(3)
    assert held.occupancy.rows == 0


def test_sinks_that_later_chunks_complete_are_kept_after_those():
    held, ids = store(windows=Windows(sink=100, recent=64)), tokens(1)
    forward(held, cold(1, ids, end=64))
    assert held.cap(1000, ids) == 0
    forward(held, Prefill(1, "r1", ids, 64, 192))
    assert held.cap(1000, ids) == 896
    assert forward(held).keep == ((1, 0),)


def test_hits_of_a_batch_name_their_entries_before_misses_take_any():
    held, old, new = store(entries=1), tokens(1), tokens(2)
    forward(held, cold(1, old))
    moves = forward(held, cold(2, new), warm(3, old, 640))
    assert moves.restore == ((0, 3),)
    # The entry is the newer one's from now on, and written after it was read.
    assert held.cap(1000, old) == 0
    assert held.cap(1000, new) == 704
    assert forward(held).keep == ((2, 0),)


def test_the_entry_unused_for_longest_gives_way():
    held = store(entries=2)
    for row, seed in ((1, 1), (2, 2)):
        forward(held, cold(row, tokens(seed)))
    forward(held, warm(3, tokens(1), 640))
    forward(held, cold(4, tokens(3)))
    assert [held.cap(1000, tokens(seed)) for seed in (1, 2, 3)] == [704, 0, 704]


def test_asking_is_no_use_of_an_entry():
    held = store(entries=2)
    for row, seed in ((1, 1), (2, 2)):
        forward(held, cold(row, tokens(seed)))
    for _ in range(5):
        held.cap(1000, tokens(1))
    forward(held, cold(4, tokens(3)))
    assert held.cap(1000, tokens(1)) == 0


def test_what_must_agree_besides_tokens_is_part_of_the_key():
    held, ids = store(), tokens(1)
    forward(held, cold(1, ids, extra_key="a"))
    assert held.cap(1000, ids, "a") == 704
    assert held.cap(1000, ids) == held.cap(1000, ids, "b") == 0


def test_embeddings_are_neither_found_nor_finders():
    held, ids = store(), tokens(1)
    forward(held, cold(1, ids, private=True))
    assert held.cap(1000, ids) == 0
    forward(held, cold(2, ids))
    assert held.cap(1000, ids, private=True) == 0
    assert held.cap(1000, ids) == 704


def test_two_requests_of_one_batch_with_the_same_beginning_keep_it_once():
    held, ids = store(), tokens(1)
    forward(held, cold(1, ids), cold(2, ids))
    assert forward(held).keep == ((1, 0),)


def test_without_entries_nothing_is_reused_and_without_sinks_no_entry_is_needed():
    none, ids = store(entries=0), tokens(1)
    forward(none, cold(1, ids))
    assert none.cap(1000, ids) == 0
    sinkless = store(entries=0, windows=Windows(sink=0, recent=64))
    assert sinkless.cap(1000, ids) == 896
    assert forward(sinkless, warm(1, ids, 896)) == Moves(exact_from=((1, 896),))


def test_a_flush_forgets_requests_and_sinks():
    held, ids = store(), tokens(1)
    forward(held, cold(1, ids))
    held.clear()
    assert held.cap(1000, ids) == 0
    assert forward(held, cold(1, ids, name="again")).keep == ()
    held.check()


def test_a_request_that_leaves_before_its_forward_leaves_nothing_behind():
    held, ids = store(), tokens(1)
    held.bind([cold(1, ids)])
    held.release(1)
    assert held.drain() == Moves()
    assert held.cap(1000, ids) == 0
    held.check()


def test_occupancy_counts_rows_copies_to_come_and_kept_sinks():
    held, ids = store(), tokens(1)
    held.bind([cold(1, ids)])
    assert vars(held.occupancy) == {"rows": 1, "pinned": 1, "cached": 0}
    held.drain()
    forward(held)
    held.release(1)
    assert vars(held.occupancy) == {"rows": 0, "pinned": 0, "cached": 1}
    held.release(1)


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (warm(2, tokens(1), 640), "sinks are not kept"),
        (warm(2, tokens(9)[:600], 384), "last 256 are to be computed"),
        (cold(0, tokens(1)), "row 0"),
        (cold(9, tokens(1)), "row 9"),
        (cold(1, tokens(1), name="other"), "was given to other"),
    ],
)
def test_rows_that_nobody_wrote_are_refused_never_read(request_, told):
    held = store()
    forward(held, cold(1, tokens(7)), cold(3, tokens(9)))
    with pytest.raises(MismatchError, match=told):
        held.bind([request_])


@pytest.mark.parametrize(("rows", "entries"), [(1, 4), (8, -1)])
def test_sizes_that_hold_nothing_are_refused(rows, entries):
    with pytest.raises(ValueError, match=f"{rows} rows and {entries} entries"):
        SinkStore(WINDOWS, rows, entries)


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 5), st.booleans()), max_size=60))
def test_ranks_that_see_the_same_requests_decide_alike(events):
    ranks = store(entries=2), store(entries=2)
    seen = []
    for held in ranks:
        moves, bound = [], set()
        for number, (row, seed, leave) in enumerate(events):
            if row in bound and leave:
                held.release(row)
                bound.discard(row)
            elif row not in bound:
                prefix = min(held.cap(1000, tokens(seed)), 640)
                moves.append(forward(held, Prefill(row, f"{number}", tokens(seed), prefix, 1000)))
                bound.add(row)
            held.check()
        seen.append(moves)
    assert seen[0] == seen[1]
