import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcq.errors import InputError
from kvcq.stats.probe import PROBE_TOKENS, choose_probe, probe_queries
from kvcq.stats.sampling import RowSelection, canonical_order, row_hashes
from tests.stats.examples import digest


def kept(selection, numbers):
    return {(n, int(i)) for n in numbers for i in selection.positions(digest(n))}


def test_hashes_are_a_function_of_seed_digest_and_position():
    a = row_hashes(0, digest(1), 100)
    assert np.array_equal(a[:10], row_hashes(0, digest(1), 10))
    assert len(np.unique(a)) == 100
    assert not np.array_equal(a, row_hashes(1, digest(1), 100))
    assert not np.array_equal(a, row_hashes(0, digest(2), 100))
    # A fixed value: stored samples of other machines must merge with ours.
    assert row_hashes(0, "00" * 32, 2).tolist() == [6459116516675482580, 8232280598910614154]


def test_hashes_are_uniform_over_positions():
    counts = np.bincount((row_hashes(5, digest(0), 64000) >> np.uint64(61)).astype(int), minlength=8)
    assert abs(counts - 8000).max() < 400


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(0, 50), st.randoms())
def test_selection_is_the_bottom_k_of_all_tokens_in_any_order(lengths, rows, random):
    order = list(range(len(lengths)))
    random.shuffle(order)
    selection = RowSelection(rows, 5, seed=9)
    for n in order:
        selection.offer(digest(n), lengths[n])
    everything = sorted((int(h), n, i) for n in order for i, h in enumerate(row_hashes(9, digest(n), lengths[n])))
    assert kept(selection, order) == {(n, i) for _, n, i in everything[:rows]}
    assert selection.hashes.tolist() == [h for h, _, _ in everything[:rows]]
    queries = {(n, int(i)) for n in order for i in selection.query_positions(digest(n))}
    assert queries == {(n, i) for _, n, i in everything[: min(5, rows)]}


def test_ties_are_broken_by_digest_and_token():
    hashes = np.array([5, 5, 5, 1], np.uint64)
    order = canonical_order(hashes, ["b", "a"], np.array([0, 1, 1, 0]), np.array([0, 4, 2, 9]))
    assert order.tolist() == [3, 2, 1, 0]


def test_a_sequence_is_offered_once_and_budgets_are_checked():
    selection = RowSelection(4, 9)
    assert selection.query_rows == 4
    selection.offer(digest(0), 3)
    with pytest.raises(InputError, match="twice"):
        selection.offer(digest(0), 3)
    with pytest.raises(InputError, match="negative"):
        RowSelection(-1, 0)


def test_probe_is_the_two_smallest_digests_of_six_or_more():
    sequences = [(digest(n), [(0, 5000)]) for n in range(6)]
    plan = choose_probe(sequences)
    smallest = tuple(sorted(digest(n) for n in range(6))[:2])
    assert plan.digests == smallest
    assert not plan.split
    assert all(plan.spans[d] == (0, PROBE_TOKENS) and plan.counted[d] == 0 for d in smallest)
    assert sorted(plan.counted.values()) == [0, 0, 5000, 5000, 5000, 5000]
    assert choose_probe(sequences[::-1]) == plan


def test_probe_of_few_sequences_is_their_last_eighth():
    plan = choose_probe([(digest(0), [(0, 800)]), (digest(1), [(0, 7)]), (digest(2), [(0, 80_000)])])
    assert plan.split
    assert plan.spans == {digest(0): (700, 800), digest(2): (80_000 - PROBE_TOKENS, 80_000)}
    assert plan.counted == {digest(0): 700, digest(1): 7, digest(2): 80_000 - PROBE_TOKENS}


def test_probe_stays_within_one_segment():
    plan = choose_probe([(digest(0), [(0, 730), (730, 800)])])
    assert plan.spans == {digest(0): (730, 800)}
    assert plan.counted == {digest(0): 700}
    whole = choose_probe([(digest(n), [(0, 10), (10, 90), (90, 100)]) for n in range(6)])
    assert set(whole.spans.values()) == {(10, 90)}


@given(st.integers(0, 10_000), st.integers(1, 5000))
def test_probe_queries_are_distinct_and_in_the_last_quarter(start, length):
    queries = probe_queries(start, start + length)
    assert len(set(queries.tolist())) == len(queries) == min(64, max(length // 4, 1))
    assert queries[-1] == start + length - 1 or length // 4 <= 1
    assert queries[0] >= start + length - max(length // 4, 1)
