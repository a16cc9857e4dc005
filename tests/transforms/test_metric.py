import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcq.transforms.metric import metric_pair, nova_transform, unit_metric
from tests.transforms.test_spectral import moments

SEEDS = st.integers(0, 2**20)


@given(SEEDS)
def test_roots_are_inverse_and_square_to_the_moment(seed: int) -> None:
    m = unit_metric(moments(seed, 2, 16))
    torch.testing.assert_close(m.diagonal(dim1=-2, dim2=-1).mean(-1), torch.ones(2, dtype=torch.float64))
    root, inverse = metric_pair(m, floor=1e-12)
    torch.testing.assert_close(root @ root, m, atol=1e-10, rtol=0)
    torch.testing.assert_close(root @ inverse, torch.eye(16).double().expand(2, 16, 16), atol=1e-9, rtol=0)


def test_floor_bounds_the_inverse_of_a_singular_moment() -> None:
    m = torch.diag(torch.tensor([4.0, 1.0, 0.0, 0.0]))[None]
    root, inverse = metric_pair(m, floor=1e-2)
    torch.testing.assert_close(root[0].diagonal(), torch.tensor([2.0, 1.0, 0.2, 0.2]).double())
    torch.testing.assert_close(inverse[0].diagonal(), torch.tensor([0.5, 1.0, 5.0, 5.0]).double())


def test_zero_moment_becomes_the_identity_or_is_refused() -> None:
    zero = torch.zeros(1, 4, 4)
    assert torch.equal(unit_metric(zero)[0], torch.eye(4).double())
    with pytest.raises(ValueError, match="no positive eigenvalue"):
        metric_pair(zero)


@given(SEEDS)
def test_nova_transform_is_the_metric_with_uncorrelated_columns(seed: int) -> None:
    m, c = unit_metric(moments(seed, 2, 16)), moments(seed + 1, 2, 16)
    forward, dual, variances = nova_transform(m, c, floor=1e-12)
    torch.testing.assert_close(forward @ forward.mT, m, atol=1e-10, rtol=0)
    torch.testing.assert_close(forward.mT @ dual, torch.eye(16).double().expand(2, 16, 16), atol=1e-9, rtol=0)
    spread = forward.mT @ c @ forward
    torch.testing.assert_close(spread, torch.diag_embed(variances), atol=1e-9 * float(variances.max()), rtol=0)
    assert bool((variances.diff(dim=-1) <= 0).all())


@given(SEEDS)
def test_row_error_is_the_metric_weighted_key_error(seed: int) -> None:
    m, c = moments(seed, 1, 8), moments(seed + 1, 1, 8)
    forward, _, _ = nova_transform(m, c, floor=1e-12)
    error = torch.randn(1, 32, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weighted = torch.einsum("hti,hij,htj->", error, m, error)
    torch.testing.assert_close((error @ forward).square().sum(), weighted, rtol=1e-9, atol=0)
