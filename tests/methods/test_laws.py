"""Laws that every method of the table obeys."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from kvcq.codecs.pair import HeadCodec
from kvcq.methods.base import FitContext, LayerFit
from kvcq.methods.gain import key_error
from kvcq.methods.registry import BUILT_IN, create
from kvcq.spec.plan import LayerPlan
from kvcq.stats.view import LayerStats
from tests.methods.synthetic import anisotropic, stats_of
from tests.methods.table import TABLE, Row

SINK = FitContext().windows.sink

rows_of_table = pytest.mark.parametrize("row", TABLE, ids=[row.label for row in TABLE])


@cache
def layer(mean: float = 2.0) -> LayerStats:
    return anisotropic(mean=mean)


def fit(name: str, stats: LayerStats, seed: int = 0, **params: object) -> LayerFit:
    return create(name, params).fit_layer(stats, FitContext(seed=seed))


@cache
def fitted(index: int) -> LayerFit:
    return fit(TABLE[index].name, layer(), **TABLE[index].params)


def fit_of(row: Row) -> LayerFit:
    return fitted(TABLE.index(row))


def codec_of(result: LayerFit, stats: LayerStats) -> HeadCodec:
    plan = LayerPlan(layer=stats.geometry.layer, k=result.k, v=result.v)
    return HeadCodec.build(plan, stats.geometry, result.tensors)


def keys_hat(codec: HeadCodec, k: Tensor) -> Tensor:
    """Return what is read back of the keys at the positions from the end of the sink on."""
    return codec.keys_back(codec.keys_hat(codec.key_frame(k), SINK + torch.arange(k.shape[1])))


def values_hat(codec: HeadCodec, v: Tensor) -> Tensor:
    return codec.values_back(codec.values_hat(codec.value_frame(v), SINK + torch.arange(v.shape[1])))


def same(a: LayerFit, b: LayerFit) -> bool:
    return (a.k, a.v, a.notes, list(a.tensors)) == (b.k, b.v, b.notes, list(b.tensors)) and all(
        np.array_equal(a.tensors[role], b.tensors[role]) for role in a.tensors
    )


def relative(lost: Tensor, kept: Tensor) -> float:
    return float(lost.square().sum() / kept.square().sum())


def test_the_table_has_every_method_that_quantizes() -> None:
    assert {row.name for row in TABLE} == set(BUILT_IN) - {"bf16"}


@rows_of_table
def test_same_seed_same_bytes_at_one_and_two_threads(row: Row) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if before == 1 else 1)
        again = fit(row.name, anisotropic(), **row.params)
    finally:
        torch.set_num_threads(before)
    assert same(fit_of(row), again)


@rows_of_table
def test_serves_the_declared_roles_shapes_and_dtypes(row: Row) -> None:
    result, geometry = fit_of(row), layer().geometry
    heads, d = geometry.kv_heads, geometry.d_k
    shapes = {
        "transform": (heads, d, d),
        "query": (heads, d, d),
        "offset": (heads, d),
        "codebook": (heads, d // 4, 256, 4),
        "codebook_fp16": (heads, d // 4, 256, 4),
        "codebook_scale": (heads, d // 4),
        "bounds": (heads, d, 2),
        "order": (heads, d),
    }
    dtypes = {
        "order": "int32",
        "codebook": "int8" if result.k.codebook == "int8" else "float16",
        "codebook_fp16": "float16",
    }
    assert set(result.tensors) == set(row.roles)
    assert (result.k.transform, result.v.transform) == (row.k, row.v)
    assert (result.k.served and result.v.served) == row.served
    if reason := create(row.name).unserved:
        assert reason in (result.k.unserved, result.v.unserved)
    for role, array in result.tensors.items():
        kind = role.partition(".")[2]
        bits = (result.k if role.startswith("k.") else result.v).bits
        assert array.shape == (shapes[kind] if kind != "levels" else (heads, 2**bits))
        assert array.dtype == dtypes.get(kind, "float32")
        assert array.flags["C_CONTIGUOUS"]
        assert np.isfinite(array).all()


@rows_of_table
def test_transforms_are_invertible(row: Row) -> None:
    tensors = fit_of(row).tensors
    for side, kind in (("k", row.k), ("v", row.v)):
        if kind == "identity":
            continue
        forward = torch.from_numpy(tensors[f"{side}.transform"]).double()
        dual = torch.from_numpy(tensors["k.query"]).double() if kind == "metric" else forward
        eye = torch.eye(forward.shape[-1]).double()
        assert (forward @ dual.mT - eye).abs().max() < 1e-4


@rows_of_table
def test_scores_and_outputs_survive_the_frames(row: Row) -> None:
    stats = layer()
    codec = codec_of(fit_of(row), stats)
    q, k, v = (x[:, :64].double() for x in (stats.q_rows, stats.k_rows, stats.v_rows))
    group = stats.geometry.group
    exact = q @ k.repeat_interleave(group, 0).mT
    framed = codec.query(q) @ codec.key_frame(k).repeat_interleave(group, 0).mT + codec.query_offset(q).unsqueeze(-1)
    assert relative(framed - exact, exact) < 1e-8
    weights = torch.softmax(exact, -1)
    output = codec.output(weights @ codec.value_frame(v).repeat_interleave(group, 0))
    exact = weights @ v.repeat_interleave(group, 0)
    assert relative(output - exact, exact) < 1e-8


@rows_of_table
def test_values_keep_most_of_their_energy(row: Row) -> None:
    stats = layer(0.0)
    codec = codec_of(fit(row.name, stats, **row.params), stats)
    for hat, x in ((keys_hat, stats.k_rows), (values_hat, stats.v_rows)):
        assert relative(hat(codec, x) - x, x) < row.loss


@rows_of_table
@pytest.mark.parametrize("tokens", [1, 10, 300])
def test_survives_statistics_of_few_tokens(row: Row, tokens: int) -> None:
    """Ten tokens leave 54 of 64 directions without any energy; 300 give more rows than words."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, tokens, 64, generator=generator) for n in (2, 1, 1))
    stats = stats_of(q, k, v)
    result = fit(row.name, stats, **row.params)
    assert all(np.isfinite(array).all() for array in result.tensors.values())
    codec = codec_of(result, stats)
    assert torch.isfinite(keys_hat(codec, k)).all()
    assert torch.isfinite(values_hat(codec, v)).all()


@rows_of_table
def test_survives_a_head_that_is_zero(row: Row) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 400, 16, generator=generator) for _ in range(3))
    for x in (q, k, v):
        x[1] = 0
    result = fit(row.name, stats_of(q, k, v), **row.params)
    assert all(np.isfinite(array).all() for array in result.tensors.values())


@pytest.mark.parametrize("d", [48, 80])
@rows_of_table
def test_works_on_head_dims_that_are_no_power_of_two(row: Row, d: int) -> None:
    stats = anisotropic(heads=1, d=d, tokens=600)
    codec = codec_of(fit(row.name, stats, **row.params), stats)
    restored = codec.keys_back(codec.key_frame(stats.k_rows))
    assert relative(restored - stats.k_rows, stats.k_rows) < 1e-8


def query_weighted(name: str, stats: LayerStats, **params: object) -> float:
    result = fit(name, stats, **params)
    return float(key_error(result.k, result.tensors, stats.k_rows, stats.moments["q_second"]).sum())


@pytest.mark.parametrize("mean", [1.0, 2.0, 8.0])
def test_methods_that_see_more_lose_less(mean: float) -> None:
    stats = layer(mean)
    nova = query_weighted("nova", stats, iterations=4)
    centred = query_weighted("oscar-centered", stats)
    assert nova < 0.5 * centred
    assert centred < 0.5 * query_weighted("oscar", stats)
    assert centred < 0.5 * query_weighted("naive-int2", stats)


def test_without_a_mean_centring_changes_little() -> None:
    stats = layer(0.0)
    assert query_weighted("oscar-centered", stats) == pytest.approx(query_weighted("oscar", stats), rel=0.05)
    assert query_weighted("oscar", stats) < query_weighted("naive-int2", stats)


def test_the_mean_of_keys_costs_centred_methods_nothing() -> None:
    for name in ("oscar-centered", "nova"):
        options = {"iterations": 2} if name == "nova" else {}
        errors = [query_weighted(name, layer(mean), **options) for mean in (0.0, 8.0)]
        assert errors[1] == pytest.approx(errors[0], rel=0.03)


def test_finer_codebooks_and_more_steps_lose_less() -> None:
    stats = layer()
    by_dtype = [query_weighted("nova", stats, iterations=4, codebook=name) for name in ("int8", "e4m3", "e5m2")]
    assert by_dtype == sorted(by_dtype)
    assert query_weighted("nova", stats, iterations=12) < query_weighted("nova", stats, iterations=1)


def test_equalised_groups_lose_less_than_sorted_ones() -> None:
    errors = {name: query_weighted("nova", layer(), iterations=4, partition=name) for name in ("deal", "sorted")}
    assert errors["deal"] < errors["sorted"]


def test_own_rotations_beat_a_shared_one_on_heads_with_orthogonal_axes() -> None:
    """Each head is one strong axis in noise; their average has no preferred axis in the plane of the two."""
    generator = torch.Generator().manual_seed(0)
    d = 32
    axes = torch.linalg.qr(torch.randn(d, d, generator=generator)).Q

    def head(axis: int) -> Tensor:
        rows = 0.05 * torch.randn(2000, d, generator=generator)
        strength = torch.randn(2000, generator=generator)
        rows[:, axis] = 4 * strength / strength.square().mean().sqrt()
        rows[:, 1 - axis] = 0.05 * strength
        return rows @ axes

    stats = stats_of(*(torch.stack([head(0), head(1)]) for _ in range(3)))
    own, shared = fit("oscar", stats), fit("oscar", stats, granularity="layer")
    errors = [key_error(result.k, result.tensors, stats.k_rows) for result in (own, shared)]
    assert (errors[0] < 0.3 * errors[1]).all()
    assert min(shared.notes["shared_cost"]) > 3
    assert own.notes["shared_cost"] == shared.notes["shared_cost"]


def test_a_shared_rotation_costs_nothing_when_heads_are_alike() -> None:
    stats = layer()
    q, k, v = (x[:1].expand(2, -1, -1) for x in (stats.q_rows, stats.k_rows, stats.v_rows))
    shared = fit("oscar", stats_of(q, k, v), granularity="layer")
    assert shared.notes["shared_cost"] == pytest.approx((1.0, 1.0), abs=0.02)
    assert np.array_equal(shared.tensors["k.transform"][0], shared.tensors["k.transform"][1])


def test_sign_draws_differ_and_seeds_matter_where_they_should() -> None:
    stats = layer()
    draws = [fit("oscar", stats, signs=draw).tensors["k.transform"] for draw in (0, 1, 2)]
    assert not np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[1], draws[2])
    assert same(fit("oscar", stats, seed=0), fit("oscar", stats, seed=7))
    books = [fit("nova", stats, seed=seed, iterations=1).tensors["k.codebook"] for seed in (0, 1)]
    assert not np.array_equal(*books)


def test_notes_count_the_sampled_rows() -> None:
    stats = anisotropic(tokens=800)
    assert fit("oscar", stats).notes["value_rows"] == (800.0,)
    assert "value_rows" not in fit("oscar", stats, value_target="attention_output").notes
    assert fit("nova", stats, iterations=1, rows=400).notes == {"codebook_rows": (400.0,), "value_rows": (800.0,)}
