"""Partial results of decode, joined in torch, against float64 attention over the dequantized cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcq.errors import UnsupportedError
from kvcq.kernels.decode import decode_partials, launch_table
from kvcq.kernels.plan import Partials, Plan
from kvcq.kernels.reference import reference_decode
from kvcq.spec.plan import Windows
from tests.kernels.build import SMALL, Case, build_case, relative_error, with_lengths

SCALING = 0.11
LENGTHS = (1, 97, 0, 225)
# Partial results are float32: what remains is the rounding of queries to 15 and of weights to 14 bits.
CLOSE = 5e-4


def partials_of(
    case: Case, *, parts: int = 5, exact_rows: int = 20, window: int | None = None, **arguments: Any
) -> tuple[Plan, Partials]:
    plan = Plan.reserve(
        case.requests.batch, parts=parts, exact_rows=exact_rows, windows=case.cache.windows, device=case.q.device
    )
    plan.update(case.requests, case.cache.windows, window)
    partials = Partials.reserve(plan, case.q.shape[1], case.tables.v.d)
    partials.o.fill_(torch.nan)
    partials.ml.fill_(torch.nan)
    decode_partials(case.tables, case.cache, case.requests, case.q, plan, partials, scaling=SCALING, **arguments)
    return plan, partials


def joined(plan: Plan, partials: Partials, batch: int) -> Tensor:
    """One softmax over the items of each request, float64 ``[B, Hq, d_v]``."""
    outputs = []
    for begin, end in pairwise(plan.first[: batch + 1].tolist()):
        o, m, mass = (x[begin:end].double() for x in (partials.o, partials.ml[..., 0], partials.ml[..., 1]))
        if begin == end:
            outputs.append(torch.zeros(o.shape[1:], dtype=torch.float64, device=o.device))
            continue
        weight = mass * torch.exp2(m - m.max(0).values)
        outputs.append((o * (weight / weight.sum(0))[..., None]).sum(0))
    return torch.stack(outputs)


def error(case: Case, *, window: int | None = None, softcap: float | None = None, **sizes: int) -> float:
    offset = None if softcap is None else case.offset
    case = replace(case, q=case.q.contiguous())
    plan, partials = partials_of(case, window=window, softcap=softcap, offset=offset, **sizes)
    found = joined(plan, partials, case.requests.batch)
    assert not found.isnan().any()
    wanted = reference_decode(
        case.tables, case.cache, case.requests, case.q,
        scaling=SCALING, softcap=softcap, offset=offset, window=window, rotate=False,
    )  # fmt: skip
    assert not found[case.requests.lengths == 0].any()
    return relative_error(found, wanted)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 16])
def test_every_group_reads_its_own_head(device: torch.device, dtype: torch.dtype, group: int) -> None:
    case = build_case("int2", LENGTHS, group=group, d_k=64, dtype=dtype, device=device)
    assert error(case) < CLOSE


@pytest.mark.parametrize(("d_k", "d_v"), [(16, 16), (48, 112), (80, 80), (96, 64), (128, 128), (128, 256), (256, 144)])
@pytest.mark.parametrize("kind", ["int2", "vq"])
def test_every_head_dim(device: torch.device, dtype: torch.dtype, kind: str, d_k: int, d_v: int) -> None:
    case = build_case(kind, (3, 150), heads=2, group=3, d_k=d_k, d_v=d_v, dtype=dtype, device=device)
    assert error(case) < CLOSE


@pytest.mark.parametrize(
    ("kind", "softcap"),
    [
        *((kind, None) for kind in ("naive", "groups", "v_groups", "lloyd", "lloyd_main", "vq", "vq_groups")),
        # A cap acts on logits, to which centred keys add what their products lack.
        *((kind, 2.5) for kind in ("naive", "groups", "vq", "vq_groups")),
        *(pytest.param(kind, 2.5, marks=pytest.mark.exhaustive) for kind in ("v_groups", "lloyd", "lloyd_main")),
    ],
)
def test_every_codec_with_and_without_softcap(
    device: torch.device, dtype: torch.dtype, kind: str, softcap: float | None
) -> None:
    case = build_case(kind, LENGTHS, dtype=dtype, device=device)
    assert error(case, softcap=softcap) < CLOSE


@pytest.mark.parametrize("n", [5, 6, 29, 30, 63, 64, 65, 93, 94, 128, 129, 157, 158])
def test_lengths_at_the_edges_of_pages_and_windows(device: torch.device, dtype: torch.dtype, n: int) -> None:
    case = build_case("int2", (n, 200), heads=1, dtype=dtype, device=device)
    assert error(case) < CLOSE


@pytest.mark.parametrize("window", [1, 3, 24, 40, 64, 100, 1000])
def test_sliding_windows_cut_every_tier(device: torch.device, dtype: torch.dtype, window: int) -> None:
    case = build_case("int2", LENGTHS, heads=1, dtype=dtype, device=device)
    assert error(case, window=window) < CLOSE


@pytest.mark.parametrize(("sink", "recent", "ring"), [(0, 0, 1), (0, 70, 71), (70, 0, 3), (33, 17, 64)])
def test_windows_of_any_size(device: torch.device, dtype: torch.dtype, sink: int, recent: int, ring: int) -> None:
    windows = Windows(sink=sink, recent=recent)
    case = build_case("int2", (1, 60, 145), windows=windows, ring=ring, heads=1, dtype=dtype, device=device)
    assert error(case) < CLOSE


def test_rows_before_a_prefix_hit_are_read_from_pages(device: torch.device, dtype: torch.dtype) -> None:
    case = build_case("int2", (90, 200, 7), exact_from=(80, 200, 6), dtype=dtype, device=device)
    assert error(case) < CLOSE


def test_the_work_list_does_not_matter(device: torch.device, dtype: torch.dtype) -> None:
    case = build_case("vq", (300, 31), group=4, dtype=dtype, device=device)
    for parts, exact_rows in ((1, 64), (2, 1), (16, 7), (64, 32)):
        assert error(case, parts=parts, exact_rows=exact_rows) < CLOSE


def test_float32_rows_are_exact(device: torch.device) -> None:
    case = build_case("int2", (29, 16), group=4, dtype=torch.float32, device=device)
    assert error(case) < 2e-6


def test_a_request_does_not_see_its_neighbours(device: torch.device, dtype: torch.dtype) -> None:
    case = build_case("groups", (70, 131, 200), dtype=dtype, device=device)
    outputs = [
        joined(*partials_of(with_lengths(case, lengths), parts=300), 3)
        for lengths in ((70, 131, 200), (0, 131, 1), (0, 131, 200))
    ]
    assert torch.equal(outputs[0][1], outputs[1][1])
    assert torch.equal(outputs[0][1:], outputs[2][1:])


def test_large_queries_and_flat_tails_keep_their_digits(device: torch.device, dtype: torch.dtype) -> None:
    case = build_case("int2", (400,), group=4, dtype=dtype, device=device)
    for factor in (20.0, 1e-3):
        assert error(replace(case, q=case.q * factor)) < 2e-3


@pytest.mark.gpu
def test_a_graph_follows_lengths_that_change(device: torch.device, dtype: torch.dtype) -> None:
    case = build_case("int2", (700, 1300), group=4, d_k=128, dtype=dtype, device=device)
    case = replace(case, q=case.q.contiguous())
    short = with_lengths(case, (690, 1290))
    eager = [partials_of(which) for which in (case, short)]
    plan, partials = partials_of(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(case.requests, case.cache.windows)
        decode_partials(case.tables, case.cache, case.requests, case.q, plan, partials, scaling=SCALING)
    for which, wanted in zip((case, short), eager, strict=True):
        case.requests.lengths.copy_(which.requests.lengths)
        graph.replay()
        assert torch.equal(joined(plan, partials, 2), joined(*wanted, 2))


@pytest.mark.parametrize("d", range(16, 257, 16))
def test_launches_fit_one_warp(d: int) -> None:
    for group in range(1, 17):
        shape = launch_table(d, d, group, vq=False)
        assert shape.heads in (1, 2, 4, 8) and shape.tokens in (32, 64)
        # Accumulators of one thread: d channels times the heads, over 32 lanes.
        assert d * shape.heads // 32 <= 32


def _changed(case: Case, name: str, change: Any) -> Case:
    for part in ("cache", "requests", "tables"):
        if hasattr(getattr(case, part), name):
            held = getattr(case, part)
            return replace(case, **{part: replace(held, **{name: change(getattr(held, name))})})
    return replace(case, **{name: change(getattr(case, name))})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda x: x[..., :-16]),
        ("q", lambda x: x.double()),
        ("q", lambda x: x.mT.contiguous().mT),
        ("pages", lambda x: x[..., :-64]),
        ("pages", lambda x: x.short()),
        ("sink_k", lambda x: x[:, :, :-1]),
        ("sink_v", lambda x: x[:-1]),
        ("ring_k", lambda x: x[:, :, :10]),
        ("page_table", lambda x: x.long()),
        ("page_table", lambda x: x[:1]),
    ],
)
def test_tensors_that_do_not_fit_are_refused(device: torch.device, dtype: torch.dtype, name: str, change: Any) -> None:
    case = _changed(build_case("int2", (9, 40), dtype=dtype, device=device), name, change)
    with pytest.raises(ValueError, match=r"\d|dtype|torch"):
        partials_of(case)


def test_what_has_no_kernel_is_refused(device: torch.device, dtype: torch.dtype) -> None:
    lengths: Sequence[int] = (9,)
    with pytest.raises(UnsupportedError, match="4 bits"):
        partials_of(build_case("int4", lengths, dtype=dtype, device=device))
    with pytest.raises(UnsupportedError, match="groups are 1 to 16"):
        partials_of(build_case("int2", lengths, heads=1, group=17, dtype=dtype, device=device))
    case = build_case("int2", lengths, dtype=dtype, device=device)
    with pytest.raises(UnsupportedError, match="query heads on 2 KV heads"):
        partials_of(replace(case, q=case.q[:, :3].contiguous()))
    with pytest.raises(ValueError, match="not positive"):
        partials_of(case, softcap=0.0)
    assert case.cache.windows == SMALL
