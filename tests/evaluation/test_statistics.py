"""Statistics against values computed by hand and by enumeration."""

from fractions import Fraction
from itertools import product
from math import comb, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcq.evaluation.statistics import (
    bootstrap,
    majority,
    mcnemar,
    mean_interval,
    pair_test,
    pair_tests,
    ratio_interval,
)


@pytest.mark.parametrize(
    "b, c, p",
    [
        (0, 0, Fraction(1)),
        (1, 0, Fraction(1)),
        (0, 5, Fraction(1, 16)),
        (0, 6, Fraction(1, 32)),
        (8, 2, Fraction(112, 1024)),
        (3, 3, Fraction(1)),
        (10, 25, Fraction(2 * sum(comb(35, k) for k in range(11)), 2**35)),
    ],
)
def test_mcnemar_equals_the_exact_binomial_tail(b, c, p):
    assert mcnemar(b, c) == mcnemar(c, b) == pytest.approx(float(p), rel=1e-15)


@given(st.integers(0, 9), st.integers(0, 9))
def test_mcnemar_equals_enumeration_of_all_coin_flips(b, c):
    n = b + c
    extreme = sum(min(sum(flips), n - sum(flips)) <= min(b, c) for flips in product((0, 1), repeat=n))
    assert mcnemar(b, c) == float(Fraction(extreme, 2**n))


def test_mcnemar_of_thousands_of_pairs_neither_overflows_nor_vanishes():
    assert 0 < mcnemar(400, 600) < 1e-9
    assert mcnemar(2500, 2500) == 1.0


def test_a_bootstrap_interval_of_two_values_is_the_binomial_one():
    # The mean of 2 resampled items of {0, 1} is 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4.
    interval = mean_interval([0.0, 1.0], seed=0)
    assert (interval.low, interval.high) == (0.0, 1.0)


def test_a_bootstrap_interval_of_a_share_has_the_binomial_quantiles():
    # 50 of 100: resampled counts are B(100, 1/2), whose 2.5 % and 97.5 % quantiles are 40 and 60.
    interval = mean_interval([0.0, 1.0] * 50, seed=3)
    assert interval.low == pytest.approx(0.40, abs=0.011)
    assert interval.high == pytest.approx(0.60, abs=0.011)


def test_a_bootstrap_interval_has_the_width_of_the_standard_error():
    values = np.random.default_rng(0).normal(5.0, 2.0, 400)
    interval = mean_interval(values, seed=1)
    error = values.std() / sqrt(len(values))
    assert interval.low == pytest.approx(values.mean() - 1.96 * error, abs=0.1 * error)
    assert interval.high == pytest.approx(values.mean() + 1.96 * error, abs=0.1 * error)


def test_equal_values_have_an_interval_without_width():
    assert mean_interval([0.25] * 7, seed=0).plain() == {"low": 0.25, "high": 0.25}


def test_a_constant_ratio_has_an_interval_without_width():
    interval = ratio_interval([2.0, 4.0, 8.0], [1.0, 2.0, 4.0], seed=0)
    assert (interval.low, interval.high) == (2.0, 2.0)


def test_the_same_seed_gives_the_same_interval_and_blocks_do_not_matter(monkeypatch):
    values = list(np.random.default_rng(5).random(40))
    first = mean_interval(values, seed=2)
    assert mean_interval(values, seed=2) == first != mean_interval(values, seed=3)
    monkeypatch.setattr("kvcq.evaluation.statistics.BLOCK_ELEMENTS", 4000)
    assert mean_interval(values, seed=2) == first


@pytest.mark.parametrize("rows", [[], [1.0, 2.0], np.zeros((0, 2))])
def test_a_bootstrap_without_rows_is_refused(rows):
    with pytest.raises(ValueError, match="rows of items"):
        bootstrap(rows, lambda sums: sums[:, 0], seed=0)


def test_majority_needs_more_than_half_and_a_tie_is_wrong():
    assert majority([[True, True, False], [True, False], [False], [True]]) == [True, False, False, True]
    with pytest.raises(ValueError, match="no samples"):
        majority([[True], []])


def test_pair_test_counts_discordant_pairs_and_their_standard_error():
    first = [True] * 8 + [False] * 2 + [True] * 5
    second = [False] * 8 + [True] * 2 + [True] * 5
    result = pair_test("needle", "a", "b", first, second)
    assert (result.items, result.only_first, result.only_second) == (15, 8, 2)
    assert result.difference == pytest.approx(6 / 15)
    assert result.standard_error == pytest.approx(sqrt(10) / 15)
    assert result.p_value == pytest.approx(0.109375)


def test_pair_test_refuses_nothing_and_unequal_items():
    with pytest.raises(ValueError, match="no items"):
        pair_test("needle", "a", "b", [], [])
    with pytest.raises(ValueError):
        pair_test("needle", "a", "b", [True], [True, False])


@settings(max_examples=30)
@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=2, max_size=4))
def test_every_two_artifacts_are_compared_once(columns):
    names = [f"a{i}" for i in range(len(columns))]
    tests = pair_tests("needle", list(zip(names, columns, strict=True)))
    assert [(t.first, t.second) for t in tests] == [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    for test in tests:
        right, other = columns[names.index(test.first)], columns[names.index(test.second)]
        assert test.difference == pytest.approx((sum(right) - sum(other)) / 6)
