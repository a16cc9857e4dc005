import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvcq.transforms.spectral import compose_oscar, eigh_sorted, fix_signs
from kvcq.transforms.threads import single_threaded

SEEDS = st.integers(0, 2**20)


def moments(seed: int, heads: int, d: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(heads, 2 * d, d, generator=g, dtype=torch.float64) * (torch.randn(d, generator=g) * 2).exp()
    return x.mT @ x / (2 * d)


@given(SEEDS, st.sampled_from([8, 16, 48]), st.booleans())
def test_eigenvectors_rebuild_the_matrix_in_order_with_positive_pivots(seed: int, d: int, descending: bool) -> None:
    c = moments(seed, 2, d)
    values, vectors = eigh_sorted(c, descending)
    scale = float(c.abs().max())
    torch.testing.assert_close((vectors * values.unsqueeze(-2)) @ vectors.mT, c, atol=1e-12 * scale, rtol=0)
    steps = values.diff(dim=-1)
    assert bool((steps <= 0).all() if descending else (steps >= 0).all())
    pivot = vectors.abs().argmax(-2, keepdim=True)
    assert bool((vectors.gather(-2, pivot) > 0).all())


def test_sign_ties_take_the_lowest_index() -> None:
    column = torch.tensor([[0.1], [-0.7], [0.7 * (1 + 1e-12)]], dtype=torch.float64)
    assert torch.equal(fix_signs(column), -column)
    assert torch.equal(fix_signs(-column), -column)


@given(SEEDS, st.sampled_from([8, 16, 64]))
def test_oscar_flattens_the_moment_for_any_signs(seed: int, d: int) -> None:
    c = moments(seed, 2, d)
    vectors = eigh_sorted(c)[1]
    signs = torch.randint(0, 2, (2, d), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    flat = (c.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)).expand(2, d)
    for rotation in (compose_oscar(vectors), compose_oscar(vectors, signs)):
        diagonal = (rotation.mT @ c @ rotation).diagonal(dim1=-2, dim2=-1)
        torch.testing.assert_close(diagonal, flat, atol=0, rtol=1e-10)
        eye = torch.eye(d, dtype=torch.float64).expand(2, d, d)
        torch.testing.assert_close(rotation.mT @ rotation, eye, atol=1e-12, rtol=0)
    bare = (vectors.mT @ c @ vectors).diagonal(dim1=-2, dim2=-1)
    assert float((bare / flat).max()) > 1.5


def test_thread_count_does_not_change_the_result_and_is_restored() -> None:
    c = moments(5, 3, 64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = eigh_sorted(c)
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        one = eigh_sorted(c)
        torch.set_num_threads(2)
        with pytest.raises(RuntimeError), single_threaded():
            assert torch.get_num_threads() == 1
            raise RuntimeError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])
