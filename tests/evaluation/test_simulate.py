import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcq.codecs.attend import cap_logits, sink_logits
from kvcq.evaluation import simulate
from kvcq.evaluation.simulate import (
    exact_by_query,
    exact_served,
    simulated_attention,
)
from kvcq.spec.boundary import Boundary, served_boundaries
from kvcq.spec.plan import Windows
from tests.evaluation.helpers import geometry, plain, random_codec, random_rows

CASES = {
    "scale": {"scaling": 0.25},
    "softcap": {"scaling": 0.25, "softcap": 2.0},
    "sinks": {"scaling": 0.25, "sinks": torch.tensor([0.3, -1.0, 2.0, 4.0])},
    "softcap and sinks": {"scaling": 0.25, "softcap": 5.0, "sinks": torch.tensor([0.3, -1.0, 2.0, 4.0])},
}
CAUSAL = torch.ones(40, 40, dtype=torch.bool).tril()


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("offset", [0.0, 1.0, 10.0])
def test_a_lossless_codec_gives_plain_attention(options, kv_heads, offset):
    shape = geometry(kv_heads=kv_heads, d_v=12)
    q, k, v = random_rows(shape, 40, 40)
    codec = random_codec(shape, offset=offset)
    exact = exact_by_query(40, Windows(sink=3, recent=5))
    served = simulated_attention(q, k, v, codec, exact, CAUSAL, **options)
    wanted, _ = plain(q, k, v, CAUSAL, **options)
    assert served.dtype == torch.float32
    # float32 rows carry the offset: their rounding grows with it.
    assert (served - wanted).norm() / wanted.norm() < 1e-6 + 1e-6 * offset


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_coded_keys_are_read_decoded_and_exact_keys_exact(options):
    shape = geometry()
    q, k, v = random_rows(shape, 40, 40)
    codec = random_codec(shape, quantizer="uniform", transform="orthogonal")
    exact = exact_by_query(40, Windows(sink=3, recent=5))
    k_hat = codec.keys_back(codec.decode_keys(codec.encode_keys(codec.key_frame(k))))
    v_hat = codec.values_back(codec.decode_values(codec.encode_values(codec.value_frame(v))))
    mask = exact[None, :, :, None]
    mixed_k, mixed_v = (torch.where(mask, x[:, None], y[:, None]) for x, y in ((k, k_hat), (v, v_hat)))
    served = simulated_attention(q, k, v, codec, exact, CAUSAL, **options)
    wanted, _ = plain(q, mixed_k, mixed_v, CAUSAL, **options)
    unquantized, _ = plain(q, k, v, CAUSAL, **options)
    assert torch.allclose(served.double(), wanted, atol=2e-5)
    assert not torch.allclose(served.double(), unquantized, atol=1e-2)


def test_the_result_does_not_depend_on_the_block_of_queries(monkeypatch):
    shape = geometry()
    q, k, v = random_rows(shape, 40, 40)
    codec = random_codec(shape, quantizer="uniform", transform="orthogonal")
    exact = exact_by_query(40, Windows(sink=3, recent=5))
    whole = simulated_attention(q, k, v, codec, exact, CAUSAL, scaling=0.25)
    monkeypatch.setattr(simulate, "SCORE_ELEMENTS", 4 * 40 * 7)
    assert torch.allclose(simulated_attention(q, k, v, codec, exact, CAUSAL, scaling=0.25), whole, atol=1e-6)


def test_later_queries_over_a_longer_cache_give_the_same_rows():
    shape = geometry()
    q, k, v = random_rows(shape, 40, 40)
    codec = random_codec(shape, quantizer="uniform", transform="orthogonal")
    windows = Windows(sink=3, recent=5)
    whole = simulated_attention(q, k, v, codec, exact_by_query(40, windows), CAUSAL, scaling=0.25)
    tail = simulated_attention(q[:, 30:], k, v, codec, exact_by_query(40, windows, first=30), CAUSAL[30:], scaling=0.25)
    assert torch.allclose(tail, whole[:, 30:], atol=1e-6)


def test_nothing_is_coded_when_every_visible_key_is_exact():
    shape = geometry()
    q, k, v = random_rows(shape, 40, 40)
    codec = random_codec(shape, quantizer="uniform", transform="orthogonal", offset=0.0)
    served = simulated_attention(q, k, v, codec, CAUSAL, CAUSAL, scaling=0.25)
    assert torch.allclose(served.double(), plain(q, k, v, CAUSAL, scaling=0.25)[0], atol=1e-5)


def test_half_precision_inputs_come_back_in_their_dtype():
    shape = geometry()
    q, k, v = (x.bfloat16() for x in random_rows(shape, 40, 40))
    served = simulated_attention(q, k, v, random_codec(shape), CAUSAL, CAUSAL, scaling=0.25)
    assert served.dtype == torch.bfloat16
    assert torch.allclose(served.double(), plain(q, k, v, CAUSAL, scaling=0.25)[0], atol=2e-2)


def test_sink_probabilities_match_the_golden_values():
    products = torch.tensor(
        [[[-2.9270828994648506, 1.2314283158923214, -1.1515922662588562, 0.6622967269024997]]], dtype=torch.float64
    )
    offset = torch.tensor([[-0.33984375]], dtype=torch.float64)
    scaling = 8**-0.5
    logits = cap_logits(products, offset, scaling, None)
    for shift, wanted in ((offset, 0.28439499), (torch.zeros_like(offset), 0.26058752)):
        sink = sink_logits(torch.tensor([0.3], dtype=torch.float64), shift, scaling, None)
        assert torch.softmax(torch.cat([logits, sink[..., None]], -1), -1)[0, 0, -1] == pytest.approx(wanted, abs=1e-8)


@given(n=st.integers(1, 40), sink=st.integers(0, 12), recent=st.integers(0, 12), first=st.integers(0, 39))
def test_the_window_rule_key_by_key(n, sink, recent, first):
    first = min(first, n - 1)
    mask = exact_by_query(n, Windows(sink=sink, recent=recent), first=first)
    assert mask.tolist() == [[j < sink or j > i - recent for j in range(n)] for i in range(first, n)]


def test_two_chunks_with_a_cached_boundary():
    mask = exact_served(20, [Boundary(12, "cached")], Windows(sink=2, recent=4))
    assert mask[:12].all()
    assert mask[12:].tolist() == [[j < 2 or j >= 12 for j in range(20)]] * 8


def test_a_carried_boundary_keeps_the_ring_and_a_cached_one_empties_it():
    windows = Windows(sink=2, recent=4)
    carried = exact_served(20, [Boundary(8, "carried")], windows)
    assert carried[8:].tolist() == [[j < 2 or j >= 4 for j in range(20)]] * 12
    after_hit = exact_served(20, [Boundary(10, "cached"), Boundary(12, "carried")], windows)
    assert after_hit[15].tolist() == [j < 2 or j >= 10 for j in range(20)]
    assert torch.equal(exact_served(20, [Boundary(8, "carried")], windows, first=9), carried[9:])


@settings(max_examples=50)
@given(chunk=st.integers(1, 9), cached=st.none() | st.integers(1, 39))
def test_boundaries_cut_at_every_chunk_and_once_at_the_hit(chunk, cached):
    cuts = served_boundaries(40, chunk, cached)
    positions = [0, *(cut.position for cut in cuts), 40]
    assert all(0 < b - a <= chunk for a, b in itertools.pairwise(positions))
    assert [cut.position for cut in cuts if cut.kind == "cached"] == ([] if cached is None else [cached])
    exact_served(40, cuts, Windows(sink=2, recent=3))


@pytest.mark.parametrize("positions", [(0,), (5, 5), (9, 3), (20,)])
def test_unordered_boundaries_are_refused(positions):
    with pytest.raises(ValueError, match="increase"):
        exact_served(20, [Boundary(position, "carried") for position in positions], Windows())


@pytest.mark.parametrize(("chunk", "cached"), [(0, None), (4, 0), (4, 40)])
def test_impossible_chunks_are_refused(chunk, cached):
    with pytest.raises(ValueError, match="chunks"):
        served_boundaries(40, chunk, cached)
