from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcq.methods.kmeans import kmeans, lloyd
from kvcq.transforms.threads import single_threaded


def plain_lloyd(rows: Tensor, seed: int, words: int, iterations: int) -> Tensor:
    """The definition in float64, for data without empty words."""
    rows = rows.double()
    centroids = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:words]]
    for _ in range(iterations):
        index = (rows[:, None] - centroids).square().sum(-1).argmin(1)
        centroids = torch.stack([rows[index == word].mean(0) for word in range(words)])
    return centroids


def distortion(rows: Tensor, centroids: Tensor) -> float:
    return float((rows[:, None] - centroids).square().sum(-1).amin(1).mean())


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_equals_the_definition() -> None:
    rows = gaussian(3, 900, 4)
    found = kmeans(rows, [5, 6, 5], words=16, iterations=7)
    for index, seed in enumerate([5, 6, 5]):
        torch.testing.assert_close(found[index].double(), plain_lloyd(rows[index], seed, 16, 7), rtol=0, atol=2e-3)


def test_an_empty_word_takes_the_farthest_row() -> None:
    rows = torch.tensor([[0.0, 0.0], [0.0, 1.0], [10.0, 0.0], [10.0, 1.0], [0.0, 0.5]])
    start = torch.tensor([[0.0, 0.0], [9.0, 0.0], [100.0, 100.0]])
    expected = torch.tensor([[0.0, 0.5], [10.0, 0.5], [10.0, 1.0]])
    torch.testing.assert_close(lloyd(rows, start, torch.ones(5).double(), 1), expected)


def test_the_farthest_row_stays_in_the_average_of_its_own_word() -> None:
    rows = torch.tensor([[0.0, 0.0], [0.0, 1.0], [10.0, 0.0], [10.0, 1.0], [50.0, 50.0], [0.0, 0.5]])
    start = torch.tensor([[0.0, 0.0], [9.0, 0.0], [100.0, 100.0]])
    expected = torch.tensor([[0.0, 0.5], [70 / 3, 17.0], [50.0, 50.0]])
    torch.testing.assert_close(lloyd(rows, start, torch.ones(6).double(), 1), expected)


def test_empty_words_take_distinct_rows_by_falling_distance_and_ties_go_to_the_lowest_index() -> None:
    rows = torch.tensor([[1.0], [-7.0], [4.0]])
    found = lloyd(rows, torch.zeros(3, 1), torch.ones(3).double(), 1)
    torch.testing.assert_close(found[:, 0], torch.tensor([-2 / 3, -7.0, 4.0]))


def test_bit_equal_at_one_and_two_threads() -> None:
    rows = gaussian(6, 9000, 4)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = kmeans(rows, range(6), iterations=3)
        torch.set_num_threads(1)
        one = kmeans(rows, range(6), iterations=3)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, two)


def test_a_codebook_does_not_depend_on_its_neighbours() -> None:
    rows = gaussian(4, 700, 4)
    together = kmeans(rows, [3, 1, 2, 9], words=64, iterations=4)
    alone = kmeans(rows[2:3], [2], words=64, iterations=4)
    assert torch.equal(together[2], alone[0])


def test_leaves_the_thread_count_alone() -> None:
    before = torch.get_num_threads()
    kmeans(gaussian(1, 50, 4), [0], words=8, iterations=1)
    assert torch.get_num_threads() == before


def test_more_steps_never_raise_the_distortion() -> None:
    rows = gaussian(1, 2000, 4)
    with single_threaded():
        errors = [distortion(rows[0], kmeans(rows, [1], words=64, iterations=n)[0]) for n in (1, 2, 4, 8, 16, 25)]
    assert all(later <= earlier * (1 + 1e-4) for earlier, later in pairwise(errors))


def test_integer_weights_count_like_repeated_rows() -> None:
    """Weights act in the averages only: from equal words, one step equals the step on the repeated rows."""
    rows = gaussian(1, 300, 4)
    weights = torch.randint(1, 4, (1, 300), generator=torch.Generator().manual_seed(1)).double()
    found = kmeans(rows, [0], words=8, iterations=1, weights=weights)[0].double()
    start = rows[0, torch.randperm(300, generator=torch.Generator().manual_seed(0))[:8]].double()
    repeated = rows[0].double().repeat_interleave(weights[0].long(), 0)
    index = (repeated[:, None] - start).square().sum(-1).argmin(1)
    expected = torch.stack([repeated[index == word].mean(0) for word in range(8)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_weights_of_one_change_nothing() -> None:
    rows = gaussian(2, 600, 4)
    plain = kmeans(rows, [0, 1], words=32, iterations=5)
    assert torch.equal(plain, kmeans(rows, [0, 1], words=32, iterations=5, weights=torch.ones(2, 600)))


def test_rows_of_weight_zero_take_no_part() -> None:
    rows = gaussian(1, 500, 4)
    weights = torch.ones(1, 500)
    weights[:, 400:] = 0
    far = rows.clone()
    far[:, 400:] = 1e4
    assert torch.equal(
        kmeans(far, [0], words=32, iterations=3, weights=weights), kmeans(rows[:, :400], [0], words=32, iterations=3)
    )


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 40), distinct=st.integers(1, 40), words=st.integers(1, 32), seed=st.integers(0, 99))
def test_survives_few_and_repeated_rows(count: int, distinct: int, words: int, seed: int) -> None:
    rows = gaussian(1, distinct, 4, seed=seed)[:, torch.arange(count) % distinct]
    found = kmeans(rows, [seed], words=words, iterations=3)
    assert found.shape == (1, words, 4)
    assert torch.isfinite(found).all()
    if words >= count:
        assert distortion(rows[0], found[0]) < 1e-10


def test_a_mean_far_from_zero_costs_little() -> None:
    rows = gaussian(1, 4000, 4)
    near, far = kmeans(rows, [0]), kmeans(rows + 30, [0])
    assert distortion(rows[0] + 30, far[0]) < 1.01 * distortion(rows[0], near[0])


@pytest.mark.parametrize(
    ("rows", "seeds", "options"),
    [
        (gaussian(5, 4), [0], {}),
        (gaussian(2, 5, 4), [0], {}),
        (gaussian(1, 5, 4), [0], {"words": 257}),
        (gaussian(1, 5, 4), [0], {"weights": torch.ones(1, 4)}),
        (gaussian(1, 5, 4), [0], {"weights": torch.zeros(1, 5)}),
        (gaussian(1, 0, 4), [0], {}),
    ],
)
def test_refuses_inputs_that_disagree(rows: Tensor, seeds: list[int], options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"k-means|weight"):
        kmeans(rows, seeds, **options)  # type: ignore[arg-type]
