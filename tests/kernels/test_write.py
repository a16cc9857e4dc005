"""What `write` stores is what the codecs code, row by row, wherever the rows lie."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcq.codecs.packing import PAGE_TOKENS
from kvcq.errors import UnsupportedError
from kvcq.kernels.arrays import LayerCache
from kvcq.kernels.reference import cache_views, decode_rows, encode_rows, reference_windows, reference_write
from kvcq.kernels.windows import store_windows
from kvcq.kernels.write import write
from tests.kernels.build import KINDS, Case, build_case, relative_error

TIERS = ("sink_k", "sink_v", "ring_k", "ring_v")
# Of rows: a sum in another order, rounded to 11 bits.
ROWS = 2e-3
# Groups have every head dim, with 2 bits or with 4.
OTHER_BITS = {
    *(("groups", dims) for dims in ((80, 96), (128, 128), (16, 256))),
    *(("int4_groups", dims) for dims in ((64, 64), (112, 48), (192, 128))),
}


def tokens(case: Case, b: int = 0, start: int = 0) -> dict[str, Any]:
    """Where the tokens of request b from `start` on belong."""
    n, device = case.k[b].shape[0], case.q.device
    at = torch.arange(start, n, device=device)
    pages = case.requests.page_table[b].long()
    return {
        "slots": pages[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS,
        "positions": at.to(torch.int32),
        "requests": torch.full_like(at, b, dtype=torch.int32),
        "batch": case.requests,
    }


def copy_of(cache: LayerCache) -> LayerCache:
    return replace(cache, **{name: getattr(cache, name).clone() for name in ("pages", *TIERS)})


def empty_rows(case: Case, b: int = 0) -> tuple[Tensor, Tensor]:
    return torch.full_like(case.k[b], torch.nan), torch.full_like(case.v[b], torch.nan)


def counter(case: Case) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=case.q.device)


def stored(case: Case, cache: LayerCache, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """K bytes, V bytes and words of these tokens."""
    page, place = slots // PAGE_TOKENS, slots % PAGE_TOKENS
    k, v, words = (view[page, :, place] for view in cache_views(case.tables, cache.pages))
    return k, v, words


def assert_codes(case: Case, cache: LayerCache, rows: tuple[Tensor, Tensor], slots: Tensor) -> None:
    """The bytes and words in the pages are the codes of these rows; numbers on a border may differ: under 0.1 %."""
    found = stored(case, cache, slots)
    book = case.tables.codebook
    words = None
    if book is not None and case.tables.codebook_scale is not None:
        words = book[..., None].view(torch.int8).float() * case.tables.codebook_scale[..., None, None]
    for i, (side, row) in enumerate(zip((case.tables.k, case.tables.v), rows, strict=True)):
        codes, scale, bias, _ = encode_rows(side, row, words if i == 0 else None)
        wrong = (found[i] != codes).float().mean()
        assert wrong < 1e-3, f"{wrong:.1e} of the bytes differ"
        for half, wanted in ((2 * i, scale), (2 * i + 1, bias)):
            got = found[2][..., half].float()
            torch.testing.assert_close(got, wanted.float().expand_as(got), rtol=1e-3, atol=1e-7)
            assert (got != wanted.float()).float().mean() < 1e-3 + 1 / got.numel()


def check(case: Case, start: int = 0) -> None:
    """Write the tokens of the one request from `start` on and compare everything with the reference."""
    at = tokens(case, start=start)
    rows, clamped, wanted = empty_rows(case), counter(case), copy_of(case.cache)
    k, v = case.k[0][start:], case.v[0][start:]
    rows = rows[0][start:], rows[1][start:]
    write(case.tables, case.cache, k, v, rows=rows, windows=True, clamped=clamped, **at)
    r, values, _ = reference_write(case.tables, wanted, k, v, windows=True, **at)
    assert relative_error(rows[0], r) < ROWS
    assert relative_error(rows[1], values) < ROWS
    assert_codes(case, case.cache, rows, at["slots"])
    for name in TIERS:
        found, expected = getattr(case.cache, name), getattr(wanted, name)
        assert torch.equal(found.isnan(), expected.isnan()), name
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2, equal_nan=True)
    assert int(clamped) == 0
    untouched = torch.ones(case.cache.pages.shape[0] * PAGE_TOKENS, dtype=torch.bool)
    untouched[at["slots"].cpu()] = False
    every = torch.arange(len(untouched), device=case.q.device)[untouched.to(case.q.device)]
    for part in stored(case, case.cache, every):
        assert part.contiguous().view(torch.uint8).eq(0xFF).all()


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(sorted(KINDS)), st.sampled_from([1, 2, 15, 63, 64, 65, 77]), st.integers(0, 99))
def test_every_codec_is_written_as_the_reference_does(
    device: torch.device, dtype: torch.dtype, kind: str, n: int, seed: int
) -> None:
    check(build_case(kind, [n], d_k=32, d_v=16, dtype=dtype, device=device, seed=seed, fill=False))


@pytest.mark.parametrize(
    ("kind", "d_k", "d_v"),
    [
        pytest.param(kind, *dims, marks=pytest.mark.exhaustive if (kind, dims) in OTHER_BITS else ())
        for kind in ("int2", "groups", "int4_groups", "vq_groups")
        for dims in ((64, 64), (80, 96), (128, 128), (112, 48), (192, 128), (16, 256))
    ],
)
def test_every_head_dim(device: torch.device, dtype: torch.dtype, kind: str, d_k: int, d_v: int) -> None:
    check(build_case(kind, [66], d_k=d_k, d_v=d_v, dtype=dtype, device=device, heads=2, fill=False))


@pytest.mark.parametrize("kind", ["int2", "lloyd_main", "vq"])
def test_float32_rows(device: torch.device, kind: str) -> None:
    check(build_case(kind, [67], d_k=32, dtype=torch.float32, device=device, fill=False))


@pytest.mark.parametrize("kind", ["int2", "lloyd", "int4", "vq_groups"])
def test_one_by_one_equals_bulk(device: torch.device, dtype: torch.dtype, kind: str) -> None:
    case = build_case(kind, [70], d_k=64, dtype=dtype, device=device, fill=False)
    bulk, at = copy_of(case.cache), tokens(case)
    write(case.tables, bulk, case.k[0], case.v[0], rows=None, windows=True, clamped=counter(case), **at)
    for t in (0, 1, 31, 63, 64, 69):
        part = {name: value if name == "batch" else value[t : t + 1] for name, value in at.items()}
        k, v = case.k[0][t : t + 1], case.v[0][t : t + 1]
        write(case.tables, case.cache, k, v, rows=None, windows=False, clamped=counter(case), **part)
        for one, many in zip(stored(case, case.cache, part["slots"]), stored(case, bulk, part["slots"]), strict=True):
            assert torch.equal(one, many)


def test_a_ragged_batch_in_any_order_with_padding(device: torch.device, dtype: torch.dtype) -> None:
    case = build_case("vq_groups", [40, 3, 0, 70], d_k=32, dtype=dtype, device=device, fill=False)
    parts = [tokens(case, b) for b in (0, 1, 3)]
    at: dict[str, Any] = {n: torch.cat([p[n] for p in parts]) for n in ("slots", "positions", "requests")}
    k, v = torch.cat(case.k), torch.cat(case.v)
    order = torch.randperm(len(k), generator=torch.Generator().manual_seed(1)).to(device)
    at = {name: part[order] for name, part in at.items()}
    at["slots"][5] = -1
    # Rows of a wider tensor, as a fused projection leaves them.
    wide = torch.full((len(k), 3, 2, 32), torch.nan, dtype=dtype, device=device)
    wide[:, 0], wide[:, 2] = k[order], v[order]
    rows = torch.empty_like(k), torch.empty_like(v)
    wanted, clamped = copy_of(case.cache), counter(case)
    write(
        case.tables,
        case.cache,
        wide[:, 0],
        wide[:, 2],
        rows=rows,
        windows=True,
        clamped=clamped,
        batch=case.requests,
        **at,
    )
    r, _, _ = reference_write(case.tables, wanted, k[order], v[order], windows=True, batch=case.requests, **at)
    assert relative_error(rows[0], r) < ROWS
    kept = at["slots"] >= 0
    assert_codes(case, case.cache, (rows[0][kept], rows[1][kept]), at["slots"][kept])
    for name in TIERS:
        torch.testing.assert_close(
            getattr(case.cache, name), getattr(wanted, name), rtol=1e-2, atol=1e-2, equal_nan=True
        )


def test_what_is_read_back(device: torch.device, dtype: torch.dtype) -> None:
    case = build_case("int4", [64], d_k=64, dtype=dtype, device=device, fill=False)
    at, rows = tokens(case), empty_rows(case)
    write(case.tables, case.cache, case.k[0], case.v[0], rows=rows, windows=False, clamped=counter(case), **at)
    hats = decode_rows(case.tables, case.cache.pages[case.requests.page_table[0, :1].long()])
    for row, hat in zip(rows, hats, strict=True):
        assert relative_error(hat, row.transpose(0, 1)) < 0.2


@pytest.mark.parametrize("kind", ["int2", "naive", "vq"])
def test_rows_of_zeros_and_of_huge_numbers(device: torch.device, kind: str) -> None:
    case = build_case(kind, [4], d_k=32, dtype=torch.float32, device=device, fill=False)
    case.k[0][0], case.v[0][0] = 0, 0
    case.k[0][1] *= 1e-9
    case.k[0][2], case.v[0][2] = 1e6, 1e6
    at, rows, clamped, wanted = tokens(case), empty_rows(case), counter(case), copy_of(case.cache)
    tables = replace(case.tables, k=replace(case.tables.k, shift=torch.zeros_like(case.tables.k.shift)))
    write(tables, case.cache, case.k[0], case.v[0], rows=rows, windows=False, clamped=clamped, **at)
    _, _, count = reference_write(tables, wanted, case.k[0], case.v[0], windows=False, **at)
    assert_codes(case, case.cache, rows, at["slots"])
    assert int(clamped) == count > 0


def test_words_that_do_not_exist_are_never_chosen(device: torch.device, dtype: torch.dtype) -> None:
    case = build_case("vq", [40], d_k=32, dtype=dtype, device=device, fill=False)
    words = case.codec.k.words
    assert words is not None
    few = replace(case.codec, k=replace(case.codec.k, words=words[:, :, :100]))
    tables = type(case.tables).of(few, case.tables.heads, 32, 32, dtype, device)
    at = tokens(case)
    write(tables, case.cache, case.k[0], case.v[0], rows=None, windows=False, clamped=counter(case), **at)
    assert int(stored(case, case.cache, at["slots"])[0].max()) < 100


@pytest.mark.parametrize("first", [0, 2, 30, 69])
def test_windows_of_a_chunk(device: torch.device, dtype: torch.dtype, first: int) -> None:
    case = build_case("int2", [70, 9], d_k=32, d_v=48, dtype=dtype, device=device, fill=False)
    at = tokens(case, start=first)
    rows = case.k[0][first:].contiguous(), case.v[0][first:].contiguous()
    at["slots"][-1] = -1
    wanted = copy_of(case.cache)
    kept = at["slots"] >= 0
    reference_windows(
        wanted, (rows[0][kept], rows[1][kept]), at["positions"][kept], at["requests"][kept], case.requests
    )
    store_windows(case.cache, rows, at["positions"], at["requests"], case.requests, at["slots"])
    for name in TIERS:
        assert torch.equal(getattr(case.cache, name).nan_to_num(-7), getattr(wanted, name).nan_to_num(-7)), name


def test_what_is_refused(device: torch.device, dtype: torch.dtype) -> None:
    case = build_case("int2", [4], d_k=32, dtype=dtype, device=device, fill=False)
    at = tokens(case)
    more: dict[str, Any] = {"rows": None, "windows": True, "clamped": counter(case)}
    with pytest.raises(ValueError, match="slots is"):
        write(case.tables, case.cache, case.k[0], case.v[0], **(at | {"slots": at["slots"].int()}), **more)
    with pytest.raises(ValueError, match=r"v has shape \[3, 2, 32\]"):
        write(case.tables, case.cache, case.k[0], case.v[0][:3], **at, **more)
    with pytest.raises(ValueError, match="k with strides"):
        write(case.tables, case.cache, case.k[0].mT.contiguous().mT, case.v[0], **at, **more)
    with pytest.raises(UnsupportedError, match="3 bits"):
        tables = replace(case.tables, k=replace(case.tables.k, bits=3))
        write(tables, case.cache, case.k[0], case.v[0], **at, **more)
    with pytest.raises(ValueError, match="positions is"):
        store_windows(case.cache, (case.k[0], case.v[0]), at["slots"], at["requests"], case.requests)
    empty = {name: value if name == "batch" else value[:0] for name, value in at.items()}
    write(case.tables, case.cache, case.k[0][:0], case.v[0][:0], **empty, **more)
