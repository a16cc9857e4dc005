"""The CUDA sources of `write`, run on the CPU, store what the codecs code, whoever shares the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcq.kernels.arrays import LayerCache
from kvcq.kernels.cuda import write as cuda
from kvcq.kernels.cuda.compile import RowsVariant
from kvcq.kernels.cuda.write import Tokens, write_rows, write_uniform
from kvcq.kernels.reference import cache_views, encode_rows, reference_rows, reference_write
from kvcq.kernels.select import Limits
from tests.kernels.build import Case, build_case, relative_error
from tests.kernels.cuda_on_cpu import compiled, launch, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
TIERS = ("sink_k", "sink_v", "ring_k", "ring_v")
# So many multiprocessors that warps never have tokens of their own, and so few that they always have.
TEAMS, ALONE = Limits((9, 0), multiprocessors=1000), Limits((9, 0), multiprocessors=0)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    def run(
        variant: RowsVariant,
        device: torch.device,
        grid: tuple[int, int, int],
        pointers: tuple[Tensor | None, ...],
        strides: tuple[int, ...],
        numbers: tuple[int, ...],
    ) -> None:
        launch(library(variant, tmp_path_factory.getbasetemp()), variant, grid, [*pointers, *strides, *numbers])

    monkeypatch.setattr(cuda, "_launch", run)


@lru_cache(maxsize=16)
def library(variant: RowsVariant, folder: Path) -> Any:
    return compiled(variant, folder)


def case_of(kind: str, n: int, d: int) -> Case:
    case = build_case(kind, [n], d_k=d, d_v=d, dtype=torch.bfloat16, device=torch.device("cpu"), heads=2, fill=False)
    if n > 8:
        case.k[0][3], case.v[0][3] = 0, 0
        case.k[0][4], case.v[0][4] = case.k[0][4] * 1e-9, case.v[0][4] * 1e-9
        case.k[0][5], case.v[0][5] = 1e6, 1e6
    return case


def tokens_of(case: Case, chosen: slice = slice(None), rows: tuple[Tensor, Tensor] | None = None) -> Tokens:
    n = case.k[0].shape[0]
    at = torch.arange(n)
    slots = case.requests.page_table[0].long()[at // 64] * 64 + at % 64
    if n > 8:
        slots[7] = -1
    place = (slots[chosen], at.to(torch.int32)[chosen], torch.zeros(n, dtype=torch.int32)[chosen])
    return Tokens(*place, case.requests, rows, True, torch.zeros(1, dtype=torch.int64))


def copy_of(cache: LayerCache) -> LayerCache:
    return replace(cache, **{name: getattr(cache, name).clone() for name in ("pages", *TIERS)})


def write(case: Case, cache: LayerCache, tokens: Tokens, limits: Limits, chosen: slice = slice(None)) -> None:
    k, v = case.k[0][chosen], case.v[0][chosen]
    write_rows(case.tables, cache, k, v, tokens, limits, values=True)


def each(check: Callable[[str, int, Limits], None]) -> Callable[[str, int, Limits], None]:
    for name, values in (("kind", ["vq", "int2"]), ("d", [64, 128]), ("limits", [TEAMS, ALONE])):
        check = pytest.mark.parametrize(name, values)(check)
    return check


@each
def test_codes_are_those_of_the_codec(kind: str, d: int, limits: Limits) -> None:
    case = case_of(kind, 70, d)
    tables, wanted = case.tables, copy_of(case.cache)
    rows = torch.full_like(case.k[0], torch.nan), torch.full_like(case.v[0], torch.nan)
    tokens = tokens_of(case, rows=rows)
    write(case, case.cache, tokens, limits)
    kept = tokens.slots >= 0
    page, place = tokens.slots[kept] // 64, tokens.slots[kept] % 64
    views = cache_views(tables, case.cache.pages)
    assert tables.codebook is None or tables.codebook_scale is not None
    words = None
    if tables.codebook is not None and tables.codebook_scale is not None:
        words = tables.codebook[..., None].view(torch.int8).float() * tables.codebook_scale[..., None, None]
    exact = reference_rows(tables, case.k[0], case.v[0])
    for i, side in enumerate((tables.k, tables.v)):
        assert relative_error(rows[i], exact[i]) < 2e-3
        codes, scale, bias, _ = encode_rows(side, rows[i][kept], words if i == 0 else None)
        assert (views[i][page, :, place] != codes).float().mean() < 1e-3
        affine = views[2][page, :, place]
        assert torch.equal(affine[..., 0, 2 * i], scale[..., 0])
        assert torch.equal(affine[..., 0, 2 * i + 1], bias[..., 0])
    at: dict[str, Any] = {
        "slots": tokens.slots,
        "positions": tokens.positions,
        "requests": tokens.requests,
        "batch": case.requests,
    }
    *_, clamped = reference_write(tables, wanted, case.k[0], case.v[0], windows=True, **at)
    assert int(tokens.clamped) == int(clamped) > 0
    for name in TIERS:
        found, expected = getattr(case.cache, name).float(), getattr(wanted, name).float()
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2, equal_nan=True)
    untouched = torch.ones(case.cache.pages.shape[0] * 64, dtype=torch.bool)
    untouched[tokens.slots[kept]] = False
    every = torch.arange(len(untouched))[untouched]
    for view in views:
        assert view[every // 64, :, every % 64].contiguous().view(torch.uint8).eq(0xFF).all()


@pytest.mark.parametrize("kind", ["vq", "int2"])
@pytest.mark.parametrize("d", [64, 128])
def test_one_by_one_equals_bulk_whoever_shares_the_work(kind: str, d: int) -> None:
    case = case_of(kind, 66, d)
    alone, single = copy_of(case.cache), copy_of(case.cache)
    write(case, case.cache, tokens_of(case), TEAMS)
    write(case, alone, tokens_of(case), ALONE)
    assert torch.equal(case.cache.pages, alone.pages)
    for t in (0, 5, 31, 65):
        chosen = slice(t, t + 1)
        tokens = tokens_of(case, chosen)
        write(case, single, tokens, TEAMS, chosen)
        page, place = tokens.slots // 64, tokens.slots % 64
        for one, many in zip(
            cache_views(case.tables, single.pages), cache_views(case.tables, alone.pages), strict=True
        ):
            assert torch.equal(one[page, :, place], many[page, :, place])


def test_blocks_of_keys_and_values_take_turns_in_any_order() -> None:
    case = case_of("vq", 290, 64)
    turns = copy_of(case.cache)
    write(case, case.cache, tokens_of(case), ALONE)
    # Three tiles of two heads: four blocks of keys, four of values, the two that are left of either.
    write(case, turns, tokens_of(case), Limits((9, 0), multiprocessors=2))
    assert torch.equal(case.cache.pages, turns.pages)
    assert not case.cache.pages.view(torch.uint8)[case.requests.page_table[0, :4].long()].eq(0xFF).all(-1).any()


def test_keys_without_values() -> None:
    case = case_of("vq", 40, 64)
    alone, none = copy_of(case.cache), copy_of(case.cache)
    write(case, case.cache, tokens_of(case), TEAMS)
    write_rows(case.tables, alone, case.k[0], case.v[0], tokens_of(case), TEAMS, values=False)
    keys, values, _ = cache_views(case.tables, alone.pages)
    assert torch.equal(keys, cache_views(case.tables, case.cache.pages)[0])
    assert torch.equal(values, cache_views(case.tables, none.pages)[1])
    assert torch.equal(alone.ring_k.view(torch.int16), case.cache.ring_k.view(torch.int16))


def test_rows_that_are_not_aligned() -> None:
    case = case_of("int2", 20, 64)
    wide = torch.zeros(20, 2, 67, dtype=torch.bfloat16)
    wide[..., 3:] = case.k[0]
    moved = copy_of(case.cache)
    write_uniform(case.tables, case.cache, case.k[0], case.v[0], tokens_of(case), TEAMS, keys=True)
    write_uniform(case.tables, moved, wide[..., 3:], case.v[0], tokens_of(case), TEAMS, keys=True)
    assert torch.equal(case.cache.pages, moved.pages)
