"""Stored levels: nearest, bounded, the same for a row alone; outliers exact."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from kvcq.codecs.levels import decode_levels, encode_levels, gaussian_levels, levels_hat, outlier_mask
from kvcq.codecs.side import SideCodec
from kvcq.errors import UnsupportedError
from kvcq.spec.codec import CodecSpec, Unit

D = 16
rows = arrays.arrays(np.float32, (2, 3, D), elements=st.floats(-100, 100, width=32))
LEVELS = torch.tensor([gaussian_levels(2), (-1.0, -0.2, 0.1, 0.8)])
BOUNDS = torch.stack([-torch.arange(1.0, D + 1), torch.arange(2.0, D + 2)], -1).expand(2, D, 2).contiguous()


def spec(unit: Unit, **fields: Any) -> CodecSpec:
    return CodecSpec(quantizer="levels", unit=unit, **fields)


def bounds_of(unit: Unit) -> Tensor | None:
    return BOUNDS if unit == "channel" else None


def side(unit: Unit, **fields: Any) -> SideCodec:
    return SideCodec.build("k", spec(unit, **fields), (2, D), {"k.levels": LEVELS, "k.bounds": BOUNDS})


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_gaussian_levels_are_a_fixed_point_and_symmetric(bits: int) -> None:
    levels = torch.tensor(gaussian_levels(bits), dtype=torch.float64)
    assert torch.equal(levels, -levels.flip(0)) and (levels.diff() > 0).all()
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    borders = (levels[1:] + levels[:-1]) / 2
    inner = torch.cat([torch.zeros(1), normal.cdf(borders), torch.ones(1)])
    density = torch.cat([torch.zeros(1), normal.log_prob(borders).exp(), torch.zeros(1)])
    torch.testing.assert_close(-density.diff() / inner.diff(), levels, rtol=0, atol=1e-12)


@given(rows)
@settings(max_examples=50)
@pytest.mark.parametrize("unit", ["norm", "range", "channel"])
def test_the_code_is_the_nearest_level(unit: Unit, x: np.ndarray) -> None:
    x_t = torch.from_numpy(x)
    coded = encode_levels(x_t, LEVELS, spec(unit), bounds_of(unit))
    hat = decode_levels(coded.codes, coded.scale, coded.bias, LEVELS, bounds_of(unit))
    every = [
        decode_levels(torch.full_like(coded.codes, code), coded.scale, coded.bias, LEVELS, bounds_of(unit))
        for code in range(4)
    ]
    best = torch.stack([(x_t - other).abs() for other in every]).amin(0)
    slack = 1e-5 * (1 + x_t.abs() + best)
    assert ((x_t - hat).abs() <= best + slack).all()


@given(rows)
@settings(max_examples=50)
def test_range_codes_stay_within_a_cell_of_the_row(x: np.ndarray) -> None:
    """Levels from -1 to 1 leave at most half the widest gap, in units of half the range."""
    levels = torch.tensor([[-1.0, -0.25, 0.25, 1.0]] * 2)
    x_t = torch.from_numpy(x)
    hat = levels_hat(x_t, levels, spec("range"), None)
    half = (x_t.amax(-1, keepdim=True) - x_t.amin(-1, keepdim=True)) / 2
    assert ((hat - x_t).abs() <= 0.375 * half + 2e-3 * (half + x_t.abs().amax(-1, keepdim=True)) + 1e-6).all()


@given(rows)
@settings(max_examples=30)
@pytest.mark.parametrize("unit", ["range", "channel"])
def test_outliers_are_exact_and_do_not_widen_the_rest(unit: Unit, x: np.ndarray) -> None:
    given_spec = spec(unit, outliers=0.1)
    x_t = torch.from_numpy(x)
    mask = outlier_mask(x_t, given_spec, bounds_of(unit))
    hat = levels_hat(x_t, LEVELS, given_spec, bounds_of(unit))
    assert torch.equal(hat[mask], x_t[mask].half().float())
    louder = torch.where(mask, 3 * x_t, x_t)
    if torch.equal(outlier_mask(louder, given_spec, bounds_of(unit)), mask):
        assert torch.equal(levels_hat(louder, LEVELS, given_spec, bounds_of(unit))[~mask], hat[~mask])
    if unit == "range":
        assert (mask.sum(-1) == given_spec.row_outliers(D)).all()
    else:
        assert torch.equal(mask, (x_t < BOUNDS[0, :, 0]) | (x_t > BOUNDS[0, :, 1]))


@pytest.mark.parametrize("unit", ["norm", "range", "channel"])
@pytest.mark.parametrize("outliers", [0.0, 0.1])
def test_a_row_reads_back_alike_alone_and_in_company(unit: Unit, outliers: float) -> None:
    if unit == "norm" and outliers:
        return
    codec = side(unit, outliers=outliers)
    x = torch.randn(2, 20, D, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(20)
    whole = codec.hat(x, positions)
    for t in range(20):
        assert torch.equal(codec.hat(x[:, t : t + 1], positions[t : t + 1]), whole[:, t : t + 1])


def test_packed_codes_decode_to_the_same_as_hat() -> None:
    codec = side("norm")
    x = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(0))
    coded = codec.encode(x)
    assert coded.codes.shape == (2, 5, D // 4) and coded.scale.dtype == torch.float16
    assert torch.equal(codec.decode(coded), codec.hat(x, torch.arange(5)))


def test_rows_of_zeros_and_huge_rows_survive() -> None:
    for unit in ("norm", "range", "channel"):
        codec = side(unit)
        assert torch.isfinite(codec.decode(codec.encode(torch.zeros(2, 1, D)))).all()
        huge = codec.encode(torch.full((2, 1, D), 1e6))
        assert torch.isfinite(codec.decode(huge)).all()
        assert int(huge.clamped) == (0 if unit == "channel" else 2 * D)
    zeros = side("norm").decode(side("norm").encode(torch.zeros(2, 1, D)))
    assert (zeros == 0).all()


def test_outlier_lists_have_no_codes_of_single_rows() -> None:
    with pytest.raises(UnsupportedError, match="no codes of single rows: levels"):
        side("range", outliers=0.1).encode(torch.zeros(2, 1, D))
