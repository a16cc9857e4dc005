"""The reference agrees with the codecs: the same tiers, the same attention, the same codes."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvcq.codecs.attend import Tier, attend
from kvcq.kernels.reference import (
    decode_rows,
    reference_decode,
    reference_extend,
    reference_query,
    reference_rows,
    reference_write,
)
from kvcq.spec.plan import Windows
from tests.kernels.build import KINDS, SMALL, Case, before_chunk, build_case, relative_error, with_lengths

SCALING = 0.125


def tiers(case: Case, b: int) -> list[Tier]:
    """The request as `codecs.attend` sees it: decoded rows of all tokens, exact rows of all tokens."""
    k, v = case.k[b].transpose(0, 1), case.v[b].transpose(0, 1)
    r, rows = case.codec.key_frame(k), case.codec.value_frame(v)
    positions = torch.arange(k.shape[1])
    hat = case.codec.keys_hat(r, positions), case.codec.values_hat(rows, positions)
    sink = case.cache.windows.sink
    return [
        Tier("sink", 0, r[:, :sink], rows[:, :sink]),
        Tier("coded", sink, hat[0][:, sink:], hat[1][:, sink:]),
        Tier("recent", sink, r[:, sink:], rows[:, sink:]),
    ]


def expected(case: Case, b: int, query: Tensor, oldest: Tensor, first: int, window: int | None, **more: Any) -> Tensor:
    """Attention outputs ``[n, Hq, d_v]`` of queries ``[n, Hq, d_k]``."""
    own = torch.arange(first, first + query.shape[0])
    at = torch.arange(first + query.shape[0])
    visible = at <= own[:, None]
    if window is not None:
        visible &= at > own[:, None] - window
    q = query.transpose(0, 1).double()
    return attend(
        case.codec, q, tiers(case, b), oldest, first=first, visible=visible, scaling=SCALING, **more
    ).transpose(0, 1)


@given(
    kind=st.sampled_from(sorted(KINDS)),
    lengths=st.lists(st.sampled_from([1, 3, 5, 6, 29, 30, 63, 64, 65, 130, 200]), min_size=1, max_size=3),
    group=st.integers(1, 5),
    softcap=st.sampled_from([None, 3.0]),
    learned=st.booleans(),
    window=st.sampled_from([None, 1, 20, 70]),
    data=st.data(),
)
def test_decode_is_attention_over_the_tiers(
    kind: str, lengths: list[int], group: int, softcap: float | None, learned: bool, window: int | None, data: Any
) -> None:
    starts = [data.draw(st.sampled_from([0, n // 2, n - 1])) for n in lengths]
    case = build_case(kind, lengths, group=group, d_k=32, d_v=16, dtype=torch.float32, exact_from=starts)
    sinks = torch.randn(2 * group) if learned else None
    mapped, offset = reference_query(case.tables, case.query)
    more: dict[str, Any] = {"scaling": SCALING, "softcap": softcap, "offset": offset, "sinks": sinks, "window": window}
    found = reference_decode(case.tables, case.cache, case.requests, mapped, **more)
    for b, n in enumerate(lengths):
        oldest = torch.tensor([max(n - SMALL.recent, starts[b])])
        wanted = expected(case, b, case.query[b : b + 1], oldest, n - 1, window, softcap=softcap, sinks=sinks)
        assert relative_error(found[b], wanted[0]) < 1e-5
    some = reference_decode(case.tables, case.cache, case.requests, mapped, rows=[len(lengths) - 1], **more)
    torch.testing.assert_close(some[0], found[-1])


@given(
    kind=st.sampled_from(["int2", "centred", "vq", "int4_groups"]),
    chunks=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 80)), min_size=1, max_size=3),
    softcap=st.sampled_from([None, 3.0]),
    learned=st.booleans(),
    window=st.sampled_from([None, 1, 40]),
    served=st.booleans(),
)
def test_extend_is_attention_over_the_tiers(
    kind: str,
    chunks: list[tuple[int, int]],
    softcap: float | None,
    learned: bool,
    window: int | None,
    served: bool,
) -> None:
    lengths = [first + count for first, count in chunks]
    case = build_case(kind, lengths, d_k=32, d_v=16, dtype=torch.float32)
    case = before_chunk(case, [first for first, _ in chunks])
    sinks = torch.randn(4) if learned else None
    parts, oldest, rows_k, rows_v = [], [], [], []
    for b, (first, count) in enumerate(chunks):
        parts.append(torch.randn(count, 4, 32))
        at = torch.arange(first, first + count)
        oldest.append(torch.full_like(at, first - SMALL.recent) if served else at - SMALL.recent + 1)
        r, rows = reference_rows(case.tables, case.k[b][first:], case.v[b][first:])
        rows_k.append(r)
        rows_v.append(rows)
    query = torch.cat(parts)
    mapped, offset = reference_query(case.tables, query)
    starts = torch.tensor([0, *torch.tensor([count for _, count in chunks]).cumsum(0).tolist()])
    found = reference_extend(
        case.tables,
        case.cache,
        case.requests,
        mapped,
        (torch.cat(rows_k), torch.cat(rows_v)),
        starts=starts,
        oldest=torch.cat(oldest),
        scaling=SCALING,
        softcap=softcap,
        offset=offset,
        sinks=sinks,
        window=window,
    )
    for b, (first, count) in enumerate(chunks):
        if count:
            wanted = expected(case, b, parts[b], oldest[b], first, window, softcap=softcap, sinks=sinks)
            assert relative_error(found[starts[b] : starts[b + 1]], wanted) < 1e-5


def test_a_query_that_needs_rows_which_nobody_kept_is_refused() -> None:
    case = build_case("int2", [200], d_k=32, dtype=torch.float32)
    with pytest.raises(ValueError, match="not stored"):
        reference_extend(
            case.tables,
            case.cache,
            case.requests,
            case.q,
            reference_rows(case.tables, case.k[0][-1:], case.v[0][-1:]),
            starts=torch.tensor([0, 1]),
            oldest=torch.tensor([100]),
            scaling=SCALING,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_writing_gives_the_pages_and_windows_of_the_codecs(kind: str) -> None:
    lengths = [70, 1, 0, 129]
    wanted = build_case(kind, lengths, d_k=32, d_v=64, dtype=torch.float16)
    empty = build_case(kind, lengths, d_k=32, d_v=64, dtype=torch.float16, fill=False)
    order = torch.cat([torch.stack([torch.full((n,), b), torch.arange(n)], 1) for b, n in enumerate(lengths)])
    order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(1))]
    b, at = order.unbind(1)
    page = empty.requests.page_table[b, at // 64].long()
    k = torch.stack([wanted.k[i][p] for i, p in order.tolist()])
    v = torch.stack([wanted.v[i][p] for i, p in order.tolist()])
    _, _, clamped = reference_write(
        empty.tables,
        empty.cache,
        k,
        v,
        slots=page * 64 + at % 64,
        positions=at,
        requests=b,
        batch=empty.requests,
        windows=True,
    )
    # The codecs shift before they map, the tables after it, by a float32 vector: sums near zero round differently.
    centred = wanted.tables.k.offset is not None or wanted.tables.v.offset is not None

    def agree(found: Tensor, same: Tensor) -> bool:
        return relative_error(found, same) < 1e-4 if centred else torch.equal(found, same)

    assert clamped == 0
    for row, n in enumerate(lengths):
        pages = wanted.requests.page_table[row, : -(-n // 64)].long()
        for found, same in zip(
            decode_rows(empty.tables, empty.cache.pages[pages]),
            decode_rows(wanted.tables, wanted.cache.pages[pages]),
            strict=True,
        ):
            assert agree(found[:, :n], same[:, :n])
    for name in ("sink_k", "sink_v", "ring_k", "ring_v"):
        found, same = getattr(empty.cache, name), getattr(wanted.cache, name)
        assert torch.equal(found.isnan(), same.isnan())
        assert agree(found.nan_to_num(), same.nan_to_num())


def test_tokens_without_a_slot_are_not_stored() -> None:
    case = build_case("int2", [3], d_k=32, dtype=torch.float16, fill=False)
    before = case.cache.pages.clone()
    reference_write(
        case.tables,
        case.cache,
        case.k[0],
        case.v[0],
        slots=torch.full((3,), -1),
        positions=torch.arange(3),
        requests=torch.zeros(3, dtype=torch.int32),
        batch=case.requests,
        windows=True,
    )
    assert torch.equal(case.cache.pages, before)
    assert bool(case.cache.ring_k.isnan().all())


def test_padding_rows_get_zeros() -> None:
    case = with_lengths(build_case("centred", [70, 70], d_k=32, windows=Windows(sink=0, recent=0)), [70, 0])
    out = reference_decode(case.tables, case.cache, case.requests, case.q, scaling=SCALING, sinks=torch.zeros(4))
    assert bool((out[1] == 0).all())
    assert bool(out[0].abs().sum() > 0)
