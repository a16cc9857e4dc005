import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvcq.codecs import codebook
from kvcq.codecs.codebook import lookup, nearest, snap_float8, snap_int8

SEEDS = st.integers(0, 2**20)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(SEEDS, st.integers(1, 256), st.integers(0, 40))
def test_argmax_form_is_the_nearest_neighbour(seed: int, count: int, rows: int) -> None:
    x, words = draw(seed, 3, rows, 4), draw(seed + 1, 3, count, 4)
    index = nearest(x, words)
    distance = (x[:, :, None].double() - words[:, None].double()).square().sum(-1)
    found = distance.gather(-1, index.long().unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found, distance.amin(-1), atol=1e-5, rtol=1e-6)
    words_of = lookup(index.mT[None], words[None])[0].unflatten(1, (-1, 4)).transpose(0, 1)
    assert torch.equal(words_of, torch.stack([w[i.long()] for w, i in zip(words, index, strict=True)]))


def test_ties_take_the_lowest_index() -> None:
    words = torch.tensor([[[1.0, 0, 0, 0], [0, 1.0, 0, 0], [1.0, 0, 0, 0]]])
    assert nearest(torch.tensor([[[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 1.0, 0, 0]]]), words).tolist() == [[0, 0, 1]]


@given(SEEDS, st.sampled_from([1, 256, 4096, 1 << 18]))
def test_an_index_does_not_depend_on_the_batch_or_the_tiling(seed: int, tile: int) -> None:
    x, words = draw(seed, 5, 33, 4), draw(seed + 1, 5, 256, 4)
    whole = nearest(x, words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codebook, "CPU_TILE", tile)
        assert torch.equal(nearest(x, words), whole)
    assert torch.equal(nearest(x[2:3, 7:8], words[2:3]), whole[2:3, 7:8])


@given(SEEDS, st.floats(1e-3, 1e3))
def test_snapped_int8_is_close_and_idempotent(seed: int, size: float) -> None:
    raw = draw(seed, 2, 3, 16, 4) * size
    words, scale = snap_int8(raw)
    snapped = words.float() * scale[..., None, None]
    assert bool(((snapped - raw).abs() <= scale[..., None, None] * 0.5001).all())
    again, scale_again = snap_int8(snapped)
    assert torch.equal(again, words)
    assert torch.equal(scale_again, scale)


def test_zero_codebooks_have_a_positive_scale() -> None:
    words, scale = snap_int8(torch.zeros(1, 2, 4, 4))
    assert not words.any()
    assert scale.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(("name", "step"), [("e4m3", 2**-4), ("e5m2", 2**-3)])
def test_snapped_float8_is_close_idempotent_and_saturates(name: str, step: float) -> None:
    raw = draw(3, 2, 256, 4)
    snapped = snap_float8(raw, name)  # type: ignore[arg-type]
    assert snapped.dtype == torch.float16
    assert bool(((snapped - raw).abs() <= step * raw.abs() + 2**-9).all())
    assert torch.equal(snap_float8(snapped, name), snapped)  # type: ignore[arg-type]
    assert bool(snap_float8(raw * 1e9, name).isfinite().all())  # type: ignore[arg-type]
