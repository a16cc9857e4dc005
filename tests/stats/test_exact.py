import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcq.stats.exact import LIMB_LIMIT, ExactSum, fold

VALUES = st.floats(-(2.0**48), 2.0**48, allow_nan=False)


def total(values):
    result = ExactSum.zeros(1)
    for value in values:
        result.add(torch.tensor([value], dtype=torch.float64))
    return result


@given(VALUES)
def test_limbs_reconstruct_the_value(x):
    hi, lo = fold(torch.tensor([x], dtype=torch.float64))
    assert abs(math.fsum([int(hi) * 2.0**-10, int(lo) * 2.0**-50]) - x) <= 2.0**-50


@given(st.lists(VALUES, min_size=1, max_size=8), st.randoms())
def test_sum_is_the_same_in_any_order_and_grouping(values, random):
    shuffled = values[:]
    random.shuffle(shuffled)
    cut = random.randint(0, len(values))
    left, right = total(shuffled[:cut]), total(shuffled[cut:])
    right.merge(left)
    whole = total(values)
    assert torch.equal(whole.hi, right.hi)
    assert torch.equal(whole.lo, right.lo)


def test_sum_is_exact_where_float64_is_not():
    values = [2.0**40, 1e-9, -(2.0**40)]
    for order in itertools.permutations(values):
        assert total(order).value().item() == pytest.approx(1e-9, rel=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2.0**52])
def test_values_out_of_range_are_refused_with_their_index(bad):
    with pytest.raises(ValueError, match=r"\[1\]"):
        fold(torch.tensor([0.0, bad], dtype=torch.float64))


def test_limb_overflow_is_refused_and_changes_nothing():
    full = ExactSum(torch.tensor([LIMB_LIMIT]), torch.tensor([0]))
    with pytest.raises(ValueError, match="2\\^62"):
        full.add(torch.tensor([1.0], dtype=torch.float64))
    assert full.hi.item() == LIMB_LIMIT


@pytest.mark.parametrize(
    ("hi", "lo"),
    [
        (torch.zeros(1), torch.zeros(1, dtype=torch.int64)),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)),
        (torch.tensor([LIMB_LIMIT + 1]), torch.tensor([0])),
    ],
)
def test_limbs_that_no_sum_can_have_are_refused(hi, lo):
    with pytest.raises(ValueError, match=r"limbs|2\^62"):
        ExactSum(hi, lo)


def test_sums_of_other_shapes_do_not_merge():
    with pytest.raises(ValueError, match="do not add"):
        ExactSum.zeros(1).merge(ExactSum.zeros(2))
