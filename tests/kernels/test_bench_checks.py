"""Checks of ragged batches, small: right kernels pass; kernels that shift, leave out or look at neighbours do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcq.errors import EvaluationError
from kvcq.kernels import attention
from kvcq.kernels.cuda.compile import missing, unserved
from kvcq.kernels.extend import extend
from kvcq.kernels.merge import merge
from kvcq.kernels.write import write
from kvcq.pipeline.bench import check_decode, check_write, checks, measure, run
from kvcq.pipeline.bench.check_cases import (
    CASES,
    DECODES,
    EXTENDS,
    HEAD_DIMS,
    TRITON,
    WRITES,
    Case,
    DecodeCase,
    ExtendCase,
    WriteCase,
    served,
)
from kvcq.pipeline.bench.check_write import appended
from kvcq.pipeline.bench.checks import check_cases, share_out, workers_here
from kvcq.pipeline.bench.layers import CODECS, words_of
from kvcq.pipeline.bench.ragged import Place, ragged_step
from kvcq.pipeline.bench.result import BenchResult, Check
from kvcq.pipeline.bench.run import bench
from kvcq.pipeline.bench.verdict import rows_verdict
from kvcq.pipeline.progress import SILENT
from kvcq.pipeline.requests import BenchRequest
from kvcq.spec.plan import Windows

DECODE = DecodeCase("int2", 64, 2, (1, 0, 65, 130), backends=("triton",))
WRITE = WriteCase("int2", 64, (3, 66), backends=("triton",))
EXTEND = ExtendCase("int2", 64, 2, ((70, 5), (0, 3), (130, 1)))


@pytest.fixture
def place(device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Place:
    if device.type == "cpu":
        monkeypatch.setattr(check_write, "same_bits", nearly_same_bits)
    return Place(heads=2, windows=Windows(sink=2, recent=8), slack=2, device=device, dtype=dtype)


def nearly_same_bits(one: Tensor, two: Tensor) -> bool:
    """The same codes; the interpreter's products end in other bits for rows at other places of a tile."""
    if not one.is_floating_point():
        return torch.equal(one, two)
    return torch.allclose(one, two, rtol=2e-3, atol=2e-3, equal_nan=True)


def of(case: Case, place: Place) -> Check:
    (found,) = check_cases([case], place)
    return found


@pytest.mark.parametrize(
    "case",
    [
        DECODE,
        replace(DECODE, codec="vq", d=80, group=5, learned=True),
        replace(DECODE, codec="vqx4", softcap=20.0, learned=True, window=50),
        replace(DECODE, codec="int2x4", d=96, group=1),
        WRITE,
        replace(WRITE, codec="vq", d=16, lengths=(1, 4)),
        replace(WRITE, codec="int4", lengths=(1, 4)),
        EXTEND,
        replace(EXTEND, codec="vq"),
    ],
    ids=lambda case: case.label,
)
def test_right_kernels_pass(case: Case, place: Place) -> None:
    found = of(case, place)
    assert found.ok, found.line()
    assert found.kernel == "triton" and found.error is not None and 0 <= found.error < found.limit


def small(case: Case) -> Case:
    """The same kernels over few tokens."""
    if isinstance(case, DecodeCase):
        return replace(case, lengths=DECODE.lengths, window=case.window and 50)
    return replace(case, lengths=(1, 4)) if isinstance(case, WriteCase) else replace(case, chunks=((70, 5), (0, 3)))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case", [case for case in CASES if "triton" in getattr(case, "backends", TRITON)], ids=lambda case: case.label
)
def test_right_kernels_pass_in_every_case(case: Case, place: Place) -> None:
    case = small(case)
    found = of(case if isinstance(case, ExtendCase) else replace(case, backends=TRITON), place)
    assert found.ok, found.line()


def spoiled(real: Callable[..., None], spoil: Callable[..., None]) -> Callable[..., None]:
    def launch(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        spoil(*arguments, **options)

    return launch


def shift(tables: Any, plan: Any, partial: Any, out: Tensor, **options: Any) -> None:
    out[3, 0] += 0.05 * out[3, 0].abs().mean()


def leave_out(tables: Any, plan: Any, partial: Any, out: Tensor, **options: Any) -> None:
    out[2, 1, 5] = torch.nan


def give_padding_a_value(tables: Any, plan: Any, partial: Any, out: Tensor, **options: Any) -> None:
    out[1, 0, 0] = 1e-3


def differ_next_time(calls: list[int]) -> Callable[..., None]:
    def spoil(tables: Any, plan: Any, partial: Any, out: Tensor, **options: Any) -> None:
        calls.append(len(calls))
        out[0, 0, 0] *= 1 + 1e-2 * calls[-1]

    return spoil


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (shift, "row 3 has a relative error"),
        (leave_out, "row 2 has a relative error of inf"),
        (give_padding_a_value, "must be zero"),
        (differ_next_time([]), "replayed graph differs"),
    ],
)
def test_decode_that_is_wrong_is_seen(
    spoil: Callable[..., None], said: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "merge", spoiled(merge, spoil))
    found = of(DECODE, place)
    assert not found.ok and found.problem is not None and said in found.problem, found.line()


def test_extend_that_is_wrong_is_seen(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(*arguments: Any, out: Tensor, **options: Any) -> None:
        out[7] *= 1.02

    monkeypatch.setattr(check_decode, "extend", spoiled(extend, spoil))
    found = of(EXTEND, place)
    assert found.problem is not None and found.problem.startswith("row 7 has a relative error of 2.0")


def lose_one(k: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    return k, slots.clone().index_fill(0, torch.tensor([5], device=k.device), -1) if len(k) > 5 else slots


def grow_single_ones(k: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    return k * 1.1 if len(k) < 5 else k, slots


@pytest.mark.parametrize(
    ("spoil", "said"), [(lose_one, "at most 0.02 is right"), (grow_single_ones, "one by one are stored otherwise")]
)
def test_writes_that_are_wrong_are_seen(
    spoil: Callable[..., Any], said: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(tables: Any, cache: Any, k: Tensor, v: Tensor, *, slots: Tensor, **options: Any) -> None:
        k, slots = spoil(k, slots)
        write(tables, cache, k, v, slots=slots, **options)

    monkeypatch.setattr(check_write, "write", launch)
    found = of(WRITE, place)
    assert not found.ok and found.problem is not None and said in found.problem, found.line()


def test_what_fails_is_not_ok_and_hides_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(attention, "merge", broken)
    state = torch.random.get_rng_state()
    found = list(check_cases([replace(DECODE, codec="int1"), DECODE, EXTEND], place))
    assert [check.ok for check in found] == [False, False, True]
    assert found[0].kernel == "all" and "int1" in str(found[0].problem)
    assert found[1].problem == "RuntimeError: no such kernel"
    assert torch.equal(torch.random.get_rng_state(), state)


def test_processes_check_what_one_does_in_its_order(place: Place) -> None:
    cases = [replace(EXTEND, chunks=((3, 2),)), replace(DECODE, lengths=(9,)), replace(DECODE, codec="int1")]
    found, alone = (list(share_out(cases, place, workers, print)) for workers in (2, 1))
    assert [check.case for check in found] == [case.label for case in cases]
    assert [replace(check, seconds=0) for check in found] == [replace(check, seconds=0) for check in alone]


def test_what_a_process_that_died_leaves_is_done_here(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Check("first", "triton", 0.0, 1.0)

    class Pool:
        def __init__(self, workers: int, *how: Any) -> None:
            assert workers == 2

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def map(self, function: object, cases: list[Case]) -> Iterator[list[Check]]:
            yield [first]
            raise BrokenProcessPool

    monkeypatch.setattr(checks, "ProcessPoolExecutor", Pool)
    cases = [replace(DECODE, codec="int1"), replace(DECODE, lengths=(9,))]
    said: list[str] = []
    found = list(share_out(cases, place, 8, said.append))
    assert len(said) == 1 and "died (BrokenProcessPool" in said[0] and "the 1 cases left" in said[0]
    assert found[0] is first and [check.case for check in found[1:]] == [cases[1].label]


def test_processes_are_as_many_as_memory_and_processors_let(monkeypatch: pytest.MonkeyPatch) -> None:
    for free_bytes, processors, wanted in ((1 << 37, 16, 8), (1 << 37, 4, 3), (40 << 30, 16, 2), (1 << 30, 1, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free_bytes=free_bytes: (free_bytes, 1 << 37))
        monkeypatch.setattr("os.cpu_count", lambda processors=processors: processors)
        assert workers_here() == wanted


def test_rows_count_the_same_whatever_their_size() -> None:
    wanted = torch.tensor([[1.0, 0.0], [1e6, 1e6], [0.0, 0.0]], dtype=torch.float64)
    found = wanted.clone()
    found[0, 1] = 1e-3
    error, problem = rows_verdict(found, wanted, 1e-3)
    assert problem is None and error == pytest.approx(1e-3 / 2**0.5)
    found[0, 1] = 3e-3
    assert rows_verdict(found, wanted, 1e-3)[1] == "row 0 has a relative error of 3.00e-03, at most 0.002 is right"


def test_what_nobody_may_read_is_no_number(place: Place) -> None:
    step = ragged_step("int2", 64, 2, (70, 3), replace(place, heads=1), exact_from=(66, 0))
    cache, requests = step.caches[0], step.requests
    slots = requests.slots.tolist()
    for rows in (cache.ring_k, cache.ring_v):
        held = ~rows[:, 0].isnan().any(-1)
        assert held[slots[0]].nonzero().flatten().tolist() == sorted(at % cache.ring for at in range(66, 70))
        assert held[slots[1]].nonzero().flatten().tolist() == [0, 1, 2]
        assert int(held.sum()) == 7
    assert int((~cache.sink_k[:, 0].isnan().any(-1)).sum()) == 4
    table = requests.page_table.long()
    assert cache.pages[table[0, 2:]].eq(0xFF).all() and cache.pages[table[1, 1:]].eq(0xFF).all()
    assert sorted([*table[0, :2].tolist(), *table[1, :1].tolist()]) == [0, 1, 2]
    empty = ragged_step("int2", 64, 2, (70, 3), place, fill=False)
    assert empty.caches[0].pages.eq(0xFF).all() and empty.caches[0].ring_k.isnan().all()


def test_tokens_that_are_appended_hold_windows_and_both_sides_of_pages() -> None:
    assert appended(140, 3, 4) == [0, 1, 2, 63, 64, 127, 128, 136, 137, 138, 139]
    assert appended(2, 3, 4) == [0, 1] and appended(64, 0, 1) == [0, 63]


def test_cases_hold_what_they_should() -> None:
    assert {case.codec for case in DECODES} == set(CODECS)
    decoded = {(case.codec, case.d, case.group) for case in DECODES}
    assert decoded >= {(codec, d, group) for codec in ("int2", "vq") for d in HEAD_DIMS for group in (1, 4)}
    assert {(case.codec, case.d) for case in DECODES} == {(codec, d) for codec in CODECS for d in HEAD_DIMS}
    assert {case.group for case in DECODES} == {1, 4, 5, 8}
    assert any(case.softcap for case in DECODES) and any(case.learned for case in DECODES)
    assert any(case.window for case in DECODES) and max(DECODES[0].lengths) == 100000
    assert {case.codec for case in WRITES} == {*CODECS, "int4"} and {case.d for case in WRITES} >= {80, 128, 256}
    assert {case.d for case in EXTENDS} == {64, 80, 128, 256} and {case.group for case in EXTENDS} == {1, 4}
    extended = {(case.codec, case.d, case.group) for case in EXTENDS}
    assert extended >= {(codec, d, group) for codec in ("int2", "vq") for d in (64, 80, 256) for group in (1, 4)}
    assert len(set(CASES)) == len(CASES) == len(DECODES) + len(WRITES) + len(EXTENDS)


def test_cases_are_for_the_kernels_that_have_them() -> None:
    for case in DECODES:
        has = unserved(case.d, case.d, case.group, words_of(case.codec)) is None
        assert ("cuda" in case.backends) == has == ("cuda" in served(case.codec, case.d, case.group))
    assert all(case.d in (64, 128) and case.codec in ("int2", "vq") for case in WRITES if "cuda" in case.backends)


@pytest.mark.parametrize("case", [DECODE, WRITE])
def test_a_kernel_that_cannot_run_says_why(case: Any, place: Place) -> None:
    if torch.cuda.is_available():
        pytest.skip("is about machines without a GPU")
    cuda, triton = check_cases([replace(case, backends=("cuda", "triton"))], place)
    assert triton.ok and not cuda.ok and cuda.problem is None and cuda.missing
    result = BenchResult({"device": "none"}, checks=[cuda, triton])
    assert not result.problems and "1 of 2 run" in result.text()
    assert f"{cuda.case}, cuda: not run: {cuda.missing}" in result.text() and "| not run |" in result.text()


def test_checks_are_in_the_tables_the_record_and_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [Check("decode it", "cuda", 1.6e-3, 2e-3), Check("decode it", "triton", None, 2e-3, "no", 1.5)]
    result = BenchResult({"device": "a GPU"}, checks=checks)
    assert "| decode it | cuda | 1.6e-03 | 0.002 | yes |\n| decode it | triton |  | 0.002 | no |" in result.text()
    assert "- wrong: decode it, triton: no" in result.text()
    record = json.loads(json.dumps(result.payload()))["checks"]
    assert [check["ok"] for check in record] == [True, False] and record[1]["seconds"] == 1.5
    assert result.problems == ["decode it, triton: no"]

    from kvcq.cli.bench import kernels

    monkeypatch.setattr(run, "bench", lambda *_: result)
    with pytest.raises(EvaluationError, match="1 result is wrong or missing, first decode it, triton: no"):
        kernels()


def test_checks_come_first_and_alone_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        measure, "share_out", lambda cases, place, workers, warn: [Check(case.label, "cuda", 0.0, 1) for case in cases]
    )
    monkeypatch.setattr(measure, "workers_here", lambda: 3)
    monkeypatch.setattr(measure, "describe_device", lambda: {"device": "none"})
    result = measure.measure(BenchRequest(ops=("check",)), [], SILENT)
    assert len(result.checks) == len(CASES) and not result.rows and result.ceiling is None and not result.problems
    lines = bench(BenchRequest(ops=("check",), dry_run=True)).plan
    assert len(lines) == len({case.label for case in CASES})
    assert "check decode int2, d 64, group 8, lengths 0 to 100000" in lines


@pytest.mark.gpu
def test_every_case_is_right_on_a_gpu() -> None:
    said: list[str] = []
    found = list(share_out(CASES, Place(), workers_here(), said.append))
    right = [check for check in found if check.ok]
    left = [check for check in found if check.problem is None and not check.ok]
    assert len(right) + len(left) == len(found) >= len(CASES), [check.line() for check in found if check.problem]
    assert not said and (missing() is not None or not left), [check.line() for check in left]
