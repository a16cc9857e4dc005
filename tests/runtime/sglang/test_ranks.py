"""Ranks hold the heads that their queries read, and those that SGLang gives them."""

from __future__ import annotations

import pytest

from kvcq.errors import MismatchError
from kvcq.runtime.sglang.ranks import head_range, legal_ranks, local_heads


def sglang_heads(kv_heads, tp, rank):
    """What ``QKVParallelLinear`` gives a rank: `test_sglang_deals_heads_so` holds these lines."""
    if tp >= kv_heads:
        return range(rank // (tp // kv_heads), rank // (tp // kv_heads) + 1)
    return range(rank * (kv_heads // tp), (rank + 1) * (kv_heads // tp))


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 5, 6, 8])
@pytest.mark.parametrize("tp", range(1, 25))
def test_every_head_is_held_by_the_rank_whose_queries_read_it(kv_heads, tp):
    if kv_heads % tp and tp % kv_heads:
        with pytest.raises(MismatchError, match=rf"{kv_heads} KV heads cannot be shared by {tp} ranks"):
            head_range(kv_heads, tp, 0)
        return
    held = [head_range(kv_heads, tp, rank) for rank in range(tp)]
    # As many query heads as both numbers divide: each rank reads with an equal share of them.
    q_heads = kv_heads * tp
    group, share = q_heads // kv_heads, q_heads // tp
    for rank, heads in enumerate(held):
        assert sorted({q // group for q in range(rank * share, (rank + 1) * share)}) == list(heads)
        assert heads == sglang_heads(kv_heads, tp, rank)
        # As ``ModelConfig.get_num_kv_heads``, by which SGLang sizes the pool.
        assert len(heads) == local_heads(kv_heads, tp) == max(1, kv_heads // tp)


def test_ranks_outside_are_refused():
    with pytest.raises(MismatchError, match="rank 2 of 2"):
        head_range(4, 2, 2)


@pytest.mark.parametrize(("kv_heads", "tp"), [(8, 3), (8, 12), (5, 2), (2, 0)])
def test_ranks_that_cannot_share_the_heads_are_refused_with_those_that_can(kv_heads, tp):
    with pytest.raises(MismatchError, match=r"--tp-size.*use 1, .*or a multiple"):
        local_heads(kv_heads, tp)


def test_legal_ranks_are_those_that_every_rank_has_whole_heads_with():
    assert legal_ranks(32, 8) == (1, 2, 4, 8, 16, 32)
    assert legal_ranks(9, 3) == (1, 3, 9)
    assert legal_ranks(12, 4) == (1, 2, 4, 12)
    assert legal_ranks(5, 1) == (1, 5)
    for q_heads, kv_heads in ((32, 8), (9, 3), (12, 4), (40, 10)):
        for tp in legal_ranks(q_heads, kv_heads):
            # The query heads of a rank are whole groups of the heads that it holds.
            assert (q_heads // tp) % local_heads(kv_heads, tp) == 0


def test_sglang_deals_heads_so(sources):
    linear = sources.text("sglang.srt.layers.linear")
    assert "if tp_size >= self.total_num_kv_heads:" in linear
    assert "self.num_kv_head_replicas = divide(tp_size, self.total_num_kv_heads)" in linear
    assert "shard_id = self.tp_rank // self.num_kv_head_replicas" in linear
    fused = sources.text("sglang.srt.layers.parameter")
    assert "tp_rank // num_heads" in fused
    pool = sources.text("sglang.srt.configs.model_config")
    assert "return max(1, total_num_kv_heads // tensor_parallel_size)" in pool
