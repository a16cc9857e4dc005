"""What the baselines of the papers promise beyond the laws of every method."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvcq.codecs.pair import HeadCodec
from kvcq.errors import InputError, UnsupportedError
from kvcq.methods.base import FitContext, LayerFit
from kvcq.methods.kvquant_nuq import channel_bounds
from kvcq.methods.line import line_kmeans
from kvcq.methods.registry import create
from kvcq.runtime.codecs import rotation_of
from kvcq.spec.geometry import RopeSpec
from kvcq.spec.plan import LayerPlan, Windows
from kvcq.stats.rotary import rotate
from kvcq.stats.view import LayerStats
from kvcq.transforms.hadamard import block_hadamard
from kvcq.transforms.orthogonal import random_rotation
from tests.methods.synthetic import anisotropic

D = 32
ROPE = RopeSpec(rotary_dims=D, inv_freq=tuple(float(np.float32(0.6**i)) for i in range(D // 2)))


def turned(stats: LayerStats, rope: RopeSpec = ROPE) -> LayerStats:
    """Return the layer as it would be with RoPE: `stats` holds its keys and moments before."""
    moments = dict(stats.moments)
    for name in ("k", "q"):
        for kind in ("mean", "second"):
            moments[f"{name}0_{kind}"] = stats.moments[f"{name}_{kind}"]
    return replace(
        stats,
        geometry=stats.geometry.model_copy(update={"rope": 0, "unrotates": True}),
        rope=rope,
        moments=moments,
        k_rows=rotate(stats.k_rows, stats.row_positions, rope),
    )


def lost(result: LayerFit, stats: LayerStats, rope: RopeSpec | None) -> float:
    """Return the relative squared error of the sampled keys."""
    plan = LayerPlan(layer=0, k=result.k, v=result.v)
    codec = HeadCodec.build(plan, stats.geometry, result.tensors, rotation=rotation_of(rope))
    hat = codec.keys_back(codec.keys_hat(codec.key_frame(stats.k_rows), stats.row_positions))
    return float((hat - stats.k_rows).square().sum() / stats.k_rows.square().sum())


@pytest.mark.parametrize("name", ["kvquant-nuq", "rotatekv"])
def test_methods_before_rope_fit_the_same_whatever_the_positions(name: str) -> None:
    plain = anisotropic(d=D)
    shifted = replace(turned(plain), row_positions=plain.row_positions + 999)
    shifted = replace(shifted, k_rows=rotate(plain.k_rows, shifted.row_positions, ROPE))
    fits = [create(name).fit_layer(stats, FitContext()) for stats in (plain, turned(plain), shifted)]
    for role, array in fits[0].tensors.items():
        for other in fits[1:]:
            np.testing.assert_allclose(other.tensors[role], array, atol=2e-3)
    errors = [
        lost(fit, stats, rope) for fit, stats, rope in zip(fits, (plain, turned(plain)), (None, ROPE), strict=False)
    ]
    assert errors[1] == pytest.approx(errors[0], rel=0.01)


@pytest.mark.parametrize("name", ["kvquant-nuq", "rotatekv"])
def test_layers_that_do_not_unrotate_are_refused_by_methods_before_rope(name: str) -> None:
    geometry = turned(anisotropic(d=D, tokens=64)).geometry
    create(name).check(geometry)
    with pytest.raises(UnsupportedError, match="those of layer 0 do not un-rotate"):
        create(name).check(geometry.model_copy(update={"unrotates": False}))
    create(name).check(geometry.model_copy(update={"unrotates": False, "rope": None}))


@pytest.mark.parametrize("name", ["kivi", "kitty"])
def test_groups_longer_than_the_recent_window_are_refused(name: str) -> None:
    method = create(name, {"group_tokens": 32})
    method.check_windows(Windows(sink=0, recent=32))
    with pytest.raises(InputError, match=r"use group_tokens of at most 31, or a longer window"):
        method.check_windows(Windows(sink=64, recent=31))
    with pytest.raises(InputError, match=r": use a longer window$"):  # no group is that small
        method.check_windows(Windows(sink=0, recent=0))


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("kivi", {"group_channels": 20}, "group_channels=20 does not divide the head dimension 32"),
        ("rotatekv", {"group_channels": 12}, "group_channels=12 does not divide the head dimension 32"),
        ("saw-int4", {"order": 64}, "order=64 does not divide the head dimension 32"),
    ],
)
def test_parameters_that_do_not_fit_the_head_are_refused(name: str, params: dict[str, int], says: str) -> None:
    with pytest.raises(InputError, match=says):
        create(name, params).check(anisotropic(d=D, tokens=64).geometry)


def test_groups_start_at_the_end_of_the_sink() -> None:
    stats = anisotropic(d=D, tokens=64)
    context = FitContext(windows=Windows(sink=12, recent=64))
    keys = create("kitty", {"group_tokens": 16}).fit_layer(stats, context).k
    assert (keys.group_start, keys.group_tokens, keys.promoted_channels(D)) == (12, 16, 4)


def test_a_value_group_never_exceeds_the_head() -> None:
    stats = anisotropic(d=D, tokens=64)
    groups = [create("kivi", {"group_channels": n}).fit_layer(stats, FitContext()).v.groups for n in (8, 32, 128)]
    assert groups == [4, 1, 1]


@pytest.mark.parametrize("d", [16, 48, 128])
def test_random_rotations_are_orthogonal_and_follow_their_seed(d: int) -> None:
    rotation = random_rotation(d, 7)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(d, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.equal(rotation, random_rotation(d, 7))
    assert (rotation - random_rotation(d, 8)).abs().max() > 0.1


def test_hadamard_blocks_mix_their_own_channels_only() -> None:
    matrix = block_hadamard(48, 16)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(48, dtype=torch.float64))
    inside = torch.block_diag(*[torch.ones(16, 16)] * 3).bool()
    assert (matrix[~inside] == 0).all()
    assert torch.allclose(matrix[inside].abs(), torch.tensor(0.25, dtype=torch.float64))
    for order in (12, 32):
        with pytest.raises(ValueError, match=f"blocks of {order} channels"):
            block_hadamard(48, order)


def test_turboquant_draws_by_layer_side_and_seed_and_reads_no_data() -> None:
    stats = anisotropic(d=D, tokens=64)
    other = replace(anisotropic(d=D, tokens=64, seed=5), geometry=stats.geometry)
    moved = replace(stats, geometry=stats.geometry.model_copy(update={"layer": 1}))

    def k(view: LayerStats, seed: int = 0) -> np.ndarray:
        return create("turboquant").fit_layer(view, FitContext(seed=seed)).tensors["k.transform"]

    assert np.array_equal(k(stats), k(other))
    assert np.array_equal(k(stats)[0], k(stats)[1])
    assert not np.array_equal(k(stats), k(moved))
    assert not np.array_equal(k(stats), k(stats, seed=1))
    fit = create("turboquant").fit_layer(stats, FitContext())
    assert not np.array_equal(fit.tensors["k.transform"], fit.tensors["v.transform"])


@pytest.mark.parametrize(("bits", "most"), [(2, 0.13), (3, 0.04), (4, 0.012)])
def test_turboquant_reaches_the_distortion_of_its_levels(bits: int, most: float) -> None:
    """The Lloyd-Max distortion of N(0, 1) is 0.1175, 0.0345 and 0.0095, for any distribution of rows."""
    stats = anisotropic(d=64, tokens=400)
    assert 0.7 * most < lost(create("turboquant", {"bits_k": bits}).fit_layer(stats, FitContext()), stats, None) < most


def test_channels_of_all_heads_are_ordered_by_their_signed_sums() -> None:
    stats = anisotropic(d=D, tokens=64)
    tensors = create("rotatekv").fit_layer(stats, FitContext()).tensors
    means = torch.bmm(stats.k_rows, torch.from_numpy(tensors["k.transform"])).mean(1).flatten()
    assert (means[torch.from_numpy(tensors["k.order"]).flatten()].diff() > -1e-5).all()
    assert sorted(tensors["k.order"].flatten()) == list(range(2 * D))


def test_alike_means_under_one_scale_cost_less() -> None:
    """Two heads whose channels lie far apart: ordered runs have the width of the noise alone."""
    stats = anisotropic(d=D, tokens=400, mean=8.0)
    fit = create("rotatekv", {"group_channels": 8}).fit_layer(stats, FitContext())
    natural = {**fit.tensors, "k.order": np.arange(2 * D, dtype=np.int32).reshape(2, D)}
    assert lost(fit, stats, None) < 0.5 * lost(replace(fit, tensors=natural), stats, None)


def test_bounds_leave_the_declared_share_outside() -> None:
    rows: Tensor = torch.randn(2, 1000, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = channel_bounds(rows, 0.02).double().unsqueeze(1).unbind(-1)
    outside = ((rows < low) | (rows > high)).double().mean(1)
    assert torch.allclose(outside, torch.tensor(0.02).double())
    low, high = channel_bounds(rows, 0.0).double().unsqueeze(1).unbind(-1)
    assert not ((rows < low) | (rows > high)).any()
    assert (channel_bounds(torch.zeros(1, 3, D), 0.01).diff(dim=-1) > 0).all()


def test_outliers_of_the_keys_are_as_rare_as_promised_and_help() -> None:
    stats = anisotropic(d=D, tokens=2000, mean=0.0)
    spikes = stats.k_rows.clone()
    spikes[:, ::50, 3] *= 30
    stats = replace(stats, k_rows=spikes)
    errors = [
        lost(create("kvquant-nuq", {"outliers": share}).fit_layer(stats, FitContext()), stats, None)
        for share in (0.02, 0.0)
    ]
    assert errors[0] < 0.5 * errors[1]


@given(st.lists(st.integers(-20, 20), min_size=1, max_size=12), st.integers(1, 4))
def test_levels_on_a_line_are_a_fixed_point_of_lloyd(numbers: list[int], count: int) -> None:
    values = np.array(numbers, dtype=np.float64)
    levels = line_kmeans(values, count)
    assert levels.shape == (count,) and (np.diff(levels) >= 0).all()
    borders = (levels[1:] + levels[:-1]) / 2
    cell = np.searchsorted(borders, values, side="right")
    for index in range(count):
        if (cell == index).any():
            assert values[cell == index].mean() == pytest.approx(levels[index], abs=1e-9)


def test_levels_on_a_line_find_what_is_there() -> None:
    draw = np.random.default_rng(0)
    values = np.concatenate([centre + 0.01 * draw.standard_normal(500) for centre in (-3.0, -1.0, 0.5, 4.0)])
    np.testing.assert_allclose(line_kmeans(values, 4), [-3.0, -1.0, 0.5, 4.0], atol=0.01)
    normal = draw.standard_normal(200_000)
    np.testing.assert_allclose(line_kmeans(normal, 4), [-1.51, -0.453, 0.453, 1.51], atol=0.02)
    with pytest.raises(ValueError, match="no values"):
        line_kmeans(values[:0], 4)


def test_kvquant_needs_rows() -> None:
    stats = anisotropic(heads=1, d=D, tokens=64)
    empty = replace(stats, k_rows=stats.k_rows[:, :0], v_rows=stats.v_rows[:, :0])
    with pytest.raises(InputError, match="no sampled rows"):
        create("kvquant-nuq").fit_layer(empty, FitContext())
