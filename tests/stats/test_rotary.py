import pytest
import torch

from kvcq.stats.rotary import average_mean, average_second, mean_rotation_moments, rotate
from tests.stats.examples import D, rope

ROPES = [
    rope(),
    rope("interleaved"),
    rope(sense=-1),
    rope(rotary=4),
    rope("interleaved", rotary=4, offset=2, sense=-1),
    rope(rotary=6, offset=1),
]


@pytest.mark.parametrize("spec", ROPES)
def test_rotation_inverts_composes_and_keeps_norms(spec):
    x = torch.randn(3, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 7, 100, 5000])
    turned = rotate(x, positions, spec)
    torch.testing.assert_close(rotate(turned, positions, spec, inverse=True), x, rtol=0, atol=1e-12)
    torch.testing.assert_close(rotate(turned, positions, spec), rotate(x, 2 * positions, spec), rtol=0, atol=1e-12)
    torch.testing.assert_close(rotate(turned, -positions, spec), x, rtol=0, atol=1e-12)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("spec", ROPES)
def test_scores_depend_on_the_distance_only(spec):
    q, k = torch.randn(2, 1, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    near = rotate(q, torch.tensor([9]), spec) @ rotate(k, torch.tensor([4]), spec).T
    far = rotate(q, torch.tensor([1009]), spec) @ rotate(k, torch.tensor([1004]), spec).T
    torch.testing.assert_close(near, far)


def test_first_pair_turns_by_the_written_formula():
    x = torch.zeros(1, D, dtype=torch.float64)
    x[0, 0] = 1.0
    half = rotate(x, torch.tensor([1]), rope())
    assert half[0, D // 2] == pytest.approx(0.8414709848)
    assert rotate(x, torch.tensor([1]), rope("interleaved"))[0, 1] == pytest.approx(0.8414709848)
    assert rotate(x, torch.tensor([1]), rope(sense=-1))[0, D // 2] == pytest.approx(-0.8414709848)


def test_no_rope_leaves_rows_alone():
    x = torch.ones(2, 3)
    assert rotate(x, torch.arange(2), None) is x


@pytest.mark.parametrize("spec", ROPES)
def test_averages_equal_brute_force_over_positions(spec):
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(6, D, dtype=torch.float64, generator=generator) + 1
    lo, hi = 3, 9000  # more than one block
    positions = torch.arange(lo, hi)
    turned = torch.stack([rotate(row.expand(len(positions), D), positions, spec) for row in rows])
    over = mean_rotation_moments(spec, lo, hi, D)
    mean = average_mean(rows.mean(0), spec, over)
    second = average_second(rows.T @ rows / len(rows), spec, over)
    flat = turned.reshape(-1, D)
    torch.testing.assert_close(mean, flat.mean(0), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(second, flat.T @ flat / len(flat), rtol=1e-10, atol=1e-10)


def test_empty_range_is_refused():
    with pytest.raises(ValueError, match="no position"):
        mean_rotation_moments(rope(), 4, 4, D)
