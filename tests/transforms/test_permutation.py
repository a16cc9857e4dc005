from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcq.transforms.permutation import Partition, bit_reversal, partition, spread_order

DIMS = st.integers(1, 16).map(lambda n: 16 * n)


@given(DIMS, st.sampled_from(get_args(Partition)), st.integers(0, 99))
def test_every_partition_is_a_permutation(d: int, name: Partition, seed: int) -> None:
    assert partition(name, d, 4, seed).sort().values.tolist() == list(range(d))


@given(DIMS)
def test_spread_order_is_a_permutation_and_follows_the_rule(d: int) -> None:
    order = spread_order(d)
    assert order.sort().values.tolist() == list(range(d))
    if d & (d - 1) == 0:
        assert torch.equal(order, d - 1 - bit_reversal(d))


@given(st.integers(0, 8))
def test_bit_reversal_is_an_involution(bits: int) -> None:
    br = bit_reversal(2**bits)
    assert torch.equal(br[br], torch.arange(2**bits))


def test_stride_deal_gives_each_block_every_third_rank() -> None:
    assert (95 - spread_order(96)).reshape(3, 32)[1].tolist() == list(range(1, 96, 3))


def test_deal_snake_sorted_and_random() -> None:
    assert partition("deal", 12).tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    assert partition("snake", 12).tolist() == [0, 5, 6, 11, 1, 4, 7, 10, 2, 3, 8, 9]
    assert partition("sorted", 12).tolist() == list(range(12))
    assert torch.equal(partition("random", 64, seed=3), partition("random", 64, seed=3))
    assert not torch.equal(partition("random", 64, seed=3), partition("random", 64, seed=4))


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        partition("deal", 10)
    with pytest.raises(ValueError, match="unknown partition"):
        partition("spiral", 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="power of two"):
        bit_reversal(96)
