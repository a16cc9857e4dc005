"""A chunk attends to pages, sinks, ring and itself as the reference says, whatever its length and place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcq.errors import UnsupportedError
from kvcq.kernels.arrays import LayerCache, Requests, Tables
from kvcq.kernels.extend import Launch, choose_launch, extend, variants
from kvcq.kernels.reference import reference_extend, reference_query, reference_rows
from kvcq.spec.plan import Windows
from tests.kernels.build import SMALL, build_case, relative_error

SCALING = 0.1
SMALL_LAUNCH = Launch(rows=64, keys=64, warps=4)


@dataclass(frozen=True)
class Chunks:
    """Arguments of `extend` but those that a test chooses."""

    tables: Tables
    cache: LayerCache
    requests: Requests
    q: Tensor
    rows: tuple[Tensor, Tensor]
    starts: Tensor
    offset: Tensor
    oldest: Tensor

    def outputs(self, **more: Any) -> tuple[Tensor, Tensor]:
        """What the kernel writes over NaN, and the reference."""
        launch = more.pop("launch", SMALL_LAUNCH)
        out = self.q.new_full((*self.q.shape[:2], self.tables.v.d), torch.nan)
        common = {"starts": self.starts, "oldest": self.oldest, "scaling": SCALING, "offset": self.offset} | more
        extend(self.tables, self.cache, self.requests, self.q, self.rows, out=out, launch=launch, **common)
        wanted = reference_extend(self.tables, self.cache, self.requests, self.q, self.rows, **common)
        return out, wanted


def build_chunks(
    kind: str,
    chunks: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    served: bool = True,
    windows: Windows = SMALL,
    cached: Sequence[int] | None = None,
    **shape: Any,
) -> Chunks:
    """Requests with ``(first, count)``: tokens before the chunk and of it.

    Args:
        kind: Of `build.KINDS`.
        chunks: What each request has.
        dtype: Served dtype.
        device: Where everything lies.
        served: Exact are the W rows before the chunk and the chunk, else the W newest rows of every query.
        windows: S and W.
        cached: Position of each request before which no exact row exists.
        shape: Of `build_case`.
    """
    firsts = [first for first, _ in chunks]
    bound = [0] * len(chunks) if cached is None else list(cached)
    lengths = [first + count for first, count in chunks]
    case = build_case(kind, lengths, dtype=dtype, device=device, windows=windows, exact_from=bound, **shape)
    cache, tables = case.cache, case.tables
    tiers = ((cache.sink_k, cache.ring_k), (cache.sink_v, cache.ring_v))
    new: tuple[list[Tensor], list[Tensor]] = ([], [])
    oldest = []
    for b, (first, count) in enumerate(chunks):
        slot = int(case.requests.slots[b])
        kept = torch.arange(max(first - cache.ring, bound[b], 0), first, device=device)
        for rows, (sink, ring), own in zip(reference_rows(tables, case.k[b], case.v[b]), tiers, new, strict=True):
            # Sinks and rings as they were before the chunk.
            sink[slot], ring[slot] = torch.nan, torch.nan
            sink[slot, :, : min(first, windows.sink)] = rows[: min(first, windows.sink)].transpose(0, 1)
            ring[slot, :, kept % cache.ring] = rows[kept].transpose(0, 1)
            own.append(rows[first:])
        at = torch.arange(first, first + count)
        by_query = torch.full_like(at, first) - windows.recent if served else at - windows.recent + 1
        oldest.append(by_query.clamp(min=bound[b]))
    draw = torch.Generator().manual_seed(7)
    q_heads = case.q.shape[1]
    query = torch.randn(sum(lengths) - sum(firsts), q_heads, tables.k.d, generator=draw).to(dtype).to(device)
    mapped, offset = reference_query(tables, query)
    shift = torch.zeros(query.shape[:2], device=device) if offset is None else offset.float()
    counts = torch.tensor([0, *(count for _, count in chunks)])
    return Chunks(
        tables,
        cache,
        case.requests,
        mapped.to(dtype).contiguous(),
        (torch.cat(new[0]), torch.cat(new[1])),
        counts.cumsum(0).to(torch.int32).to(device),
        shift.contiguous(),
        torch.cat(oldest).to(torch.int32).to(device),
    )


def bound_of(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 2e-3}[dtype]


RAGGED = [(200, 21), (0, 70), (3, 1), (64, 64), (127, 0), (30, 33)]


# Which rows are exact is the caller's, whatever the codec: every codec one way, and every quantizer both ways.
OTHER_WAY = [("int2", False), ("centred", True), ("groups", False), ("v_groups", True), ("lloyd", False)]


@pytest.mark.parametrize(
    ("kind", "served"),
    [
        *(("int2", True), ("centred", False), ("groups", True), ("v_groups", False), ("lloyd", True)),
        *(("vq", True), ("vq", False), ("vq_groups", True), ("vq_groups", False)),
        *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in OTHER_WAY),
    ],
)
def test_every_codec_over_ragged_chunks(kind: str, served: bool, device: torch.device, dtype: torch.dtype) -> None:
    chunks = build_chunks(kind, RAGGED, dtype, device, served=served)
    found, wanted = chunks.outputs(launch=SMALL_LAUNCH if served else Launch(rows=256, keys=64, warps=8))
    assert relative_error(found, wanted) < bound_of(dtype)


@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 8, 16])
def test_every_group(group: int, device: torch.device, dtype: torch.dtype) -> None:
    chunks = build_chunks("int2", [(90, 11), (3, 6)], dtype, device, group=group, d_k=32)
    found, wanted = chunks.outputs(launch=replace(SMALL_LAUNCH, rows=16 if group < 16 else 32))
    assert relative_error(found, wanted) < bound_of(dtype)


@pytest.mark.parametrize("d_k, d_v", [(16, 16), (80, 80), (96, 128), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("kind", ["centred", "vq"])
def test_every_head_dim(kind: str, d_k: int, d_v: int, device: torch.device, dtype: torch.dtype) -> None:
    found, wanted = build_chunks(kind, [(140, 9)], dtype, device, heads=1, d_k=d_k, d_v=d_v).outputs()
    assert relative_error(found, wanted) < bound_of(dtype)


@pytest.mark.parametrize("keys", [16, 32])
@pytest.mark.parametrize("first", [0, 2, 5, 63, 64, 65, 191])
def test_page_edges_and_tiles(keys: int, first: int, device: torch.device, dtype: torch.dtype) -> None:
    chunks = build_chunks("int2", [(first, 37)], dtype, device, heads=1, served=False, d_k=32)
    found, wanted = chunks.outputs(launch=replace(SMALL_LAUNCH, rows=32, keys=keys))
    assert relative_error(found, wanted) < bound_of(dtype)


# Codec, cap and sinks act on each other: all of these, and every window with each value of each.
MET = {
    ("int2", None, False, None),
    ("int2", None, True, None),
    ("int2", 3.0, False, 1),
    ("int2", 3.0, True, 40),
    ("centred", None, False, 40),
    ("centred", None, True, 1),
    ("centred", 3.0, False, None),
    ("centred", 3.0, True, None),
    ("centred", 3.0, True, 1),
}


@pytest.mark.parametrize(
    ("kind", "softcap", "learned", "window"),
    [
        pytest.param(*values, marks=() if values in MET else pytest.mark.exhaustive)
        for values in product(("int2", "centred"), (None, 3.0), (False, True), (None, 1, 40))
    ],
)
def test_softcap_learned_sinks_and_sliding_window(
    kind: str, softcap: float | None, learned: bool, window: int | None, device: torch.device, dtype: torch.dtype
) -> None:
    chunks = build_chunks(kind, [(140, 21), (0, 40), (3, 1)], dtype, device, heads=1, served=False, d_k=32, d_v=16)
    sinks = torch.linspace(-2, 3, chunks.q.shape[1], device=device) if learned else None
    for rotate in (True, False):
        found, wanted = chunks.outputs(softcap=softcap, sinks=sinks, window=window, rotate=rotate)
        assert relative_error(found, wanted) < bound_of(dtype)


@pytest.mark.parametrize("windows", [Windows(sink=0, recent=0), Windows(sink=0, recent=64), Windows(sink=64, recent=3)])
@pytest.mark.parametrize("served", [True, False])
def test_windows(windows: Windows, served: bool, device: torch.device, dtype: torch.dtype) -> None:
    chunks = build_chunks("int2", RAGGED, dtype, device, served=served, windows=windows, heads=1, d_k=32)
    found, wanted = chunks.outputs()
    assert relative_error(found, wanted) < bound_of(dtype)


def test_a_prefix_hit_leaves_no_exact_rows(device: torch.device, dtype: torch.dtype) -> None:
    chunks = build_chunks("centred", [(128, 20), (130, 9), (64, 5)], dtype, device, cached=[128, 120, 64], d_k=32)
    found, wanted = chunks.outputs()
    assert relative_error(found, wanted) < bound_of(dtype)
    # Nothing is asked of rows that do not exist, whatever the caller's bound.
    older = replace(chunks, oldest=chunks.oldest - 1000)
    out = torch.empty_like(found)
    common = {"starts": older.starts, "oldest": older.oldest, "scaling": SCALING, "launch": SMALL_LAUNCH}
    extend(older.tables, older.cache, older.requests, older.q, older.rows, out=out, **common)
    assert bool(out.isfinite().all())


def test_large_queries_and_float32_agree_closely(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("GPUs serve 16-bit rows")
    chunks = build_chunks("groups", RAGGED, torch.float32, device, served=False, group=3)
    found, wanted = replace(chunks, q=chunks.q * 50).outputs()
    assert relative_error(found, wanted) < 1e-5


def test_padding_tokens_are_left_alone(device: torch.device, dtype: torch.dtype) -> None:
    chunks = build_chunks("int2", [(70, 5), (0, 0)], dtype, device, d_k=32)
    wide = torch.cat([chunks.q, chunks.q])
    rows = torch.cat([chunks.rows[0]] * 2), torch.cat([chunks.rows[1]] * 2)
    out = torch.full_like(wide, 7.0)
    common: dict[str, Any] = {"scaling": SCALING, "launch": SMALL_LAUNCH, "starts": chunks.starts}
    extend(chunks.tables, chunks.cache, chunks.requests, wide, rows, oldest=chunks.oldest.repeat(2), out=out, **common)
    assert relative_error(out[:5], chunks.outputs()[1]) < bound_of(dtype)
    assert bool((out[5:] == 7.0).all())


def test_what_does_not_fit_is_refused_with_numbers(device: torch.device, dtype: torch.dtype) -> None:
    chunks = build_chunks("int2", [(70, 5)], dtype, device, d_k=32)
    out = torch.empty_like(chunks.q)
    common: dict[str, Any] = {"starts": chunks.starts, "oldest": chunks.oldest, "scaling": SCALING, "out": out}

    def call(**changed: Any) -> None:
        given = {"q": chunks.q, "rows": chunks.rows, "cache": chunks.cache, "tables": chunks.tables} | common | changed
        extend(given.pop("tables"), given.pop("cache"), chunks.requests, given.pop("q"), given.pop("rows"), **given)

    with pytest.raises(ValueError, match=r"starts is torch.int64 \[2\]"):
        call(starts=chunks.starts.long())
    with pytest.raises(ValueError, match=r"out is .* wanted .*\[5, 4, 32\]"):
        call(out=out[:3])
    with pytest.raises(ValueError, match="not contiguous"):
        call(q=chunks.q.transpose(0, 1).contiguous().transpose(0, 1))
    with pytest.raises(ValueError, match="1 rows of a program do not hold a group of 2"):
        call(launch=Launch(rows=1, keys=64, warps=4))
    with pytest.raises(ValueError, match="128 keys is more than a page of 64"):
        call(launch=Launch(rows=32, keys=128, warps=4))
    with pytest.raises(ValueError, match="window of 0"):
        call(window=0)
    for name in ("softcap", "scaling"):
        with pytest.raises(ValueError, match=f"a {name} of 0.0 is not positive"):
            call(**{name: 0.0})
    centred = build_chunks("centred", [(70, 5)], dtype, device, d_k=32)
    for changed in ({"softcap": 9.0}, {"sinks": torch.zeros(4, device=device)}):
        with pytest.raises(ValueError, match="over keys that are centred"):
            call(tables=centred.tables, cache=centred.cache, **changed)
    pages = torch.zeros(chunks.cache.pages.numel() + 1, dtype=torch.uint8, device=device)[1:]
    with pytest.raises(ValueError, match="not aligned to words"):
        call(cache=replace(chunks.cache, pages=pages.view(chunks.cache.pages.shape)))
    with pytest.raises(UnsupportedError, match="3 query heads on 2"):
        call(q=chunks.q[:, :3])
    four = build_chunks("int4", [(70, 5)], dtype, device, d_k=32)
    with pytest.raises(UnsupportedError, match="2 bits, not 4"):
        call(tables=four.tables, cache=four.cache)


@pytest.mark.parametrize("shared", [232448, 101376, 65536])
def test_every_head_dim_has_a_launch_that_fits(shared: int) -> None:
    for d in range(16, 257, 16):
        for rows, requests in ((1, 1), (64, 1), (100_000, 1), (100_000, 2000)):
            launch = choose_launch(d, d, rows, requests, 8, shared)
            assert launch.shared_bytes(d, d) <= shared
            assert launch.rows >= 16
            assert {bin(n).count("1") for n in (launch.rows, launch.keys, launch.warps)} == {1}
    with pytest.raises(UnsupportedError, match="the device has 30000"):
        choose_launch(256, 256, 64, 1, 8, 30000)


def test_long_chunks_take_large_programs_and_short_ones_small() -> None:
    assert choose_launch(128, 128, 4 * 4096, 1, 8).rows == 256
    assert choose_launch(256, 256, 4 * 4096, 1, 8).rows == 128
    assert choose_launch(128, 128, 4 * 512, 1, 8).rows == 128
    assert choose_launch(128, 128, 4 * 64, 1, 8).rows == 64
    assert choose_launch(128, 128, 4 * 4096, 128, 8).rows == 128
    assert choose_launch(128, 128, 4 * 4096, 1000, 8).rows == 64


def test_variants_name_every_argument_of_the_kernel() -> None:
    for name, kernel, signature, constants, _ in variants():
        assert set(signature) == set(kernel.arg_names), name
        assert set(constants) <= set(signature)
