"""Cells, figures from streams, traces, bounds and tables: everything that needs no server."""

from __future__ import annotations

import gzip
import json
import math
import re
import xml.dom.minidom
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcq.errors import EvaluationError, InputError
from kvcq.models.weightless import shape_config
from kvcq.pipeline.bench_serve import statistics
from kvcq.pipeline.bench_serve.arms import Arm, Running
from kvcq.pipeline.bench_serve.cells import Cell, fitting, parse_cells
from kvcq.pipeline.bench_serve.charts import draw_kind, write_charts
from kvcq.pipeline.bench_serve.client import Timeline
from kvcq.pipeline.bench_serve.model import Subject
from kvcq.pipeline.bench_serve.prompts import body, draw, interval_for, reusable
from kvcq.pipeline.bench_serve.result import ArmRecord, ServeBenchResult
from kvcq.pipeline.bench_serve.roofline import cache_bytes, make_bound
from kvcq.pipeline.bench_serve.rows import Row
from kvcq.pipeline.bench_serve.trace import ATTENTION, GEMM, OTHER, OWN, QUANTIZE, classify, read_trace, split
from kvcq.spec.plan import Windows
from tests.bench_serve.traces import CLASSES, GAP, LENGTH, STEP, make_events


@given(st.integers(1, 9999), st.integers(1, 9999))
def test_cells_are_read_as_they_are_written(batch, length):
    cells = parse_cells([f"{batch}x{length}", f"{batch}x{length}k"], "--cells")
    assert cells == (Cell(batch, length), Cell(batch, 1024 * length))
    assert parse_cells([cell.label for cell in cells], "--cells") == cells
    # As lengths are written elsewhere, and each cell once.
    same = parse_cells([f"{batch}x{length}{unit}" for unit in "kKmMk"], "--cells")
    assert same == (Cell(batch, 1024 * length), Cell(batch, 1024**2 * length))


def test_full_cells_ask_for_what_the_pool_holds():
    (cell,) = parse_cells(["fullx30k"], "--cells", full=True)
    assert (cell.label, cell.batch) == ("fullx30k", None)
    each = 30 * 1024 + 256 + 128
    assert cell.requests(10 * each, 256, 99) == 10 and cell.requests(10 * each - 1, 256, 99) == 9
    assert cell.requests(10 * each, 256, 4) == 4 and cell.requests(each - 1, 256, 4) == 0
    assert fitting(1000, 100, 100) == 1000 // (128 + 100 + 128)
    assert Cell(7, 100).requests(1, 1, 1) == 7


@pytest.mark.parametrize("text", ["", "x8k", "0x8k", "1x0", "1x8g", "1 x8k", "-1x8", "fullx8k", "1x8k+2", "10000x1"])
def test_what_is_no_cell_is_refused_by_its_flag(text):
    with pytest.raises(InputError, match=r"--jobs.*BATCHxINPUT"):
        parse_cells([text], "--jobs")


def test_prompts_are_seeded_and_unlike_from_their_first_page_on():
    one, two = draw(8, 500, 3, 1), draw(8, 500, 3, 2)
    assert np.array_equal(one, draw(8, 500, 3, 1))
    rows = np.concatenate([one, two])
    assert rows.min() >= 0 and rows.max() < 256
    assert len({tuple(row[:16]) for row in rows}) == 16


def test_a_request_says_what_it_wants():
    plain = json.loads(body(np.arange(3, dtype=np.int32), 5, interval=2))
    assert plain["input_ids"] == [0, 1, 2] and plain["stream"] is True
    params = plain["sampling_params"]
    assert params == {"max_new_tokens": 5, "temperature": 0.0, "ignore_eos": True, "stream_interval": 2}
    assert json.loads(body([1], 5, filled=64))["sampling_params"]["custom_params"] == {"kvcq_filled": 64}


def test_what_a_cache_gives_back_leaves_the_recent_window():
    assert [reusable(n, 256) for n in (100, 319, 320, 1024, 90 * 1024)] == [0, 0, 64, 768, 91904]
    assert reusable(65, 0) == 64
    assert [interval_for(n) for n in (1, 16, 17, 128, 500)] == [1, 1, 2, 8, 32]


def stream(sent, first, step, tokens, interval=1):
    """A request whose token n comes at ``first + (n - 1) step``."""
    told = [n for n in range(1, tokens + 1) if n == tokens or interval == 1 or n % interval == 1]
    return Timeline(sent, [(first + (n - 1) * step, n) for n in told], prompt=100, cached=0)


@pytest.mark.parametrize("interval", [1, 4, 16])
def test_the_window_is_from_the_last_first_token_to_the_first_end(interval):
    lines = [stream(0.0, 0.5 + 0.1 * n, 0.01, 200, interval) for n in range(4)]
    window = statistics.decode_window(lines)
    assert window.requests == 4
    assert window.seconds == pytest.approx(0.5 + 1.99 - 0.8)
    assert window.tokens_per_s == pytest.approx(400.0)
    assert window.step == pytest.approx(0.01)


def test_a_request_that_stands_still_is_not_counted_at_the_mean_of_others():
    lines = [stream(0.0, 1.0, 0.01, 101) for _ in range(3)]
    # It has its first token, waits while the others run, and ends with the rest.
    still = Timeline(0.0, [(1.0, 1), (3.0, 2), (3.01, 101)], prompt=100)
    window = statistics.decode_window([*lines, still])
    assert window.requests == 4 and window.seconds == pytest.approx(1.0)
    assert window.tokens_per_s == pytest.approx(300.0 + 0.5)


def test_a_window_of_fewer_is_told_as_one():
    early, late = stream(0.0, 1.0, 0.01, 50), stream(0.0, 5.0, 0.02, 50)
    window = statistics.decode_window([early, late])
    assert window.requests == 1 and window.step == pytest.approx(0.02)
    assert statistics.decode_window([stream(0.0, 1.0, 0.01, 1)]) is None


def test_requests_that_begin_late_or_end_early_do_not_run_all_the_time():
    lines = [stream(0.0, 1.0, 0.01, 101), stream(0.0, 1.2, 0.01, 101), stream(0.0, 1.0, 0.01, 51)]
    assert [statistics.running(lines, *span) for span in ((1.25, 1.45), (1.25, 1.6), (1.1, 1.4), (2.1, 2.3))] == [
        3, 2, 2, 0,
    ]  # fmt: skip


@given(st.lists(st.floats(0.001, 1.0), min_size=2, max_size=60))
def test_latencies_are_ranks(gaps):
    times = np.cumsum([1.0, *gaps])
    line = Timeline(0.25, [(float(t), n + 1) for n, t in enumerate(times)], prompt=10, cached=4)
    found = statistics.between_tokens([line])
    assert found.most == pytest.approx(max(gaps)) and found.median == pytest.approx(np.median(gaps), abs=1e-9)
    assert found.p99 == pytest.approx(sorted(gaps)[math.ceil(0.99 * len(gaps)) - 1])
    assert statistics.first_token([line]).median == pytest.approx(0.75)
    assert statistics.prefill_rate([line]) == pytest.approx(6 / 0.75)
    assert statistics.wall([line]) == pytest.approx(times[-1] - 0.25)
    assert statistics.hit_share([line]) == pytest.approx(0.4)
    assert statistics.between_tokens([stream(0, 1, 1, 1)]) is None


def test_launches_that_are_told_twice_do_not_halve_the_steps():
    events = make_events(5)
    driver = [event | {"cat": "cuda_driver", "name": "cuGraphLaunch"} for event in events if "Launch" in event["name"]]
    assert split(events + driver, 5) == split(events, 5)


@pytest.mark.parametrize("launches", [True, False])
def test_a_trace_is_split_into_whole_steps(launches):
    found = split(make_events(5, launches=launches), 5)
    assert found.step == pytest.approx(LENGTH) and found.classes == pytest.approx(CLASSES)
    assert found.gap == pytest.approx(LENGTH - sum(CLASSES.values()))
    assert found.steps in (4, 5)
    assert found.top[0] == (STEP[3][0], pytest.approx(60.0), pytest.approx(2.0))
    assert sum(duration for _, duration in STEP) == pytest.approx(sum(CLASSES.values())) and GAP == 1.0


def test_time_in_which_kernels_overlap_counts_once():
    events = [event for event in make_events(5) if event.get("cat") == "kernel"]
    for event in events:
        if event["name"] == "join_kernel":
            # It is launched when the kernel before it begins, and waits for its end.
            event["ts"], event["dur"] = event["ts"] - 21.0, event["dur"] + 21.0
    found = split(events, 5)
    # The pause between the two is now the time of the one that waits.
    assert found.classes == pytest.approx(CLASSES | {"attention": CLASSES["attention"] + 2 * GAP})
    assert sum(found.classes.values()) + found.gap == pytest.approx(found.step)


CUDA_KERNEL = re.compile(r"__global__ void (?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(")


def test_every_kernel_of_ours_has_a_class():
    from kvcq.kernels import cuda, decode, extend, merge, plan, query, windows, write

    rooms = (decode, extend, merge, plan, query, windows, write)
    names = {variant[1].__name__ for room in rooms for variant in room.variants()}
    sources = [path.read_text() for path in Path(cuda.__file__).parent.glob("*.cu")]
    found = {name for text in sources for name in CUDA_KERNEL.findall(text)}
    assert len(found) >= len(sources) == 3 and sum(text.count("__global__") for text in sources) == len(found)
    assert names | found == set(OWN)
    assert {OWN[name] for name in ("write_kernel", "windows_kernel", "write_keys")} == {QUANTIZE}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_fwd_grouped_kernel_stage1", ATTENTION),
        ("_fwd_kernel_stage2", ATTENTION),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0>(...)", ATTENTION),
        ("void flashinfer::PersistentVariableLengthMergeStatesKernel<8u>(...)", ATTENTION),
        ("create_flashinfer_kv_indices_triton", ATTENTION),
        ("get_num_kv_splits_triton", ATTENTION),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u>(...)", OTHER),
        ("_rms_norm_fwd_kernel", OTHER),
        ("void store_kvcache<256>(...)", QUANTIZE),
        ("fused_set_kv_buffer_rope", QUANTIZE),
        ("nvjet_tst_128x64_64x9_2x1_v_bz_TNT", GEMM),
        ("void cublasLt::splitKreduce_kernel<32, 16>(...)", GEMM),
        ("void gemv2T_kernel_val<int>(...)", GEMM),
        ("decode", ATTENTION),
        ("decode(float*, float2*)", ATTENTION),
        ("void at::native::vectorized_elementwise_kernel<4>(...)", OTHER),
        ("Memcpy DtoD (Device -> Device)", OTHER),
        ("act_and_mul_kernel", OTHER),
    ],
)
def test_kernels_are_classified_by_name(name, kind):
    assert classify(name) == kind


def test_a_trace_is_whole_or_none(tmp_path):
    data = gzip.compress(json.dumps({"traceEvents": make_events()}).encode())
    path = tmp_path / "a.trace.json.gz"
    for cut in (0, 10, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(EvaluationError, match="not a trace"):
            read_trace(path)
    path.write_bytes(data)
    assert len(read_trace(path)) == len(make_events())
    plain = tmp_path / "b.json"
    for text in ("[]", "{}", '{"traceEvents": 3}'):
        plain.write_text(text)
        with pytest.raises(EvaluationError, match="not a trace"):
            read_trace(plain)


@pytest.mark.parametrize("events", [[], make_events(0), make_events()[:2]])
def test_a_trace_without_steps_is_told(events):
    with pytest.raises(EvaluationError, match="profiler"):
        split(events, 24)


def test_ranks_share_the_bytes_of_a_step():
    subject = Subject("m", "m", "m", {}, config=shape_config("qwen3-8b"))
    running = Running(Arm("bf16-triton", "triton"), "", None, 1000, 1, subject.bf16_cell, {})
    one, two = (make_bound(subject, 4500.0, ranks)(running, 3, 1000) for ranks in (1, 2))
    assert one == pytest.approx(2 * two) and one > 0


def test_bytes_of_a_step():
    assert cache_bytes(1000, 100) == 100_000
    windows = Windows(sink=64, recent=256)
    assert cache_bytes(1000, 100, 14, windows) == 320 * 100 + 680 * 14
    assert cache_bytes(200, 100, 14, windows) == 20_000


def example():
    def row(kind, arm, cell, **more):
        return Row(kind, arm, cell, 1, 100, 10, **more)

    def step(arm, ms, attention, **more):
        classes = {"attention": attention, "gemm": 3000.0}
        return row("split", arm, "1x8k", running=1, step_ms=ms, classes_us=classes, **more)

    rows = [
        row("decode", "bf16-triton", "1x8k", tokens_per_s=100.0, step_ms=10.0, bound_ms=5.0),
        row("decode", "bf16-flashinfer", "1x8k", tokens_per_s=125.0, step_ms=8.0),
        row("decode", "int2", "1x8k", tokens_per_s=250.0, step_ms=4.0),
        row("decode", "int2", "2x8k", problem="HTTP 500"),
        row("job", "bf16-triton", "4x8k", wall_s=10.0),
        row("job", "int2", "4x8k", wall_s=2.0),
        step("bf16-triton", 10.0, 6000.0),
        row(
            "split", "bf16-flashinfer", "1x8k", running=1, step_ms=8.0, classes_us={"attention": 4000.0, "gemm": 3000.0}
        ),
        row(
            "split",
            "int2",
            "1x8k",
            running=1,
            step_ms=5.5,
            classes_us={"attention": 1000.0, "gemm": 3000.0},
            gap_us=9.0,
        ),
    ]
    arms = [
        ArmRecord("bf16-triton", "triton", 1000, 8, 100),
        ArmRecord("int2", "kvcq", 6500, 8, 14),
        ArmRecord("vq", "kvcq", problem="it | broke"),
    ]
    return ServeBenchResult({"device": "H200"}, "qwen3-8b, 4 layers", {}, arms, rows, 3.0)


def test_rows_are_compared_with_the_best_bf16_of_their_cell():
    result = example()
    best = {(row.kind, row.arm): result.ratio(row) for row in result.rows if row.problem is None}
    assert best[("decode", "int2")] == 2.0 and best[("decode", "bf16-triton")] == 0.8
    assert best[("job", "int2")] == 5.0 and best[("split", "int2")] == pytest.approx(8 / 5.5)
    assert result.ratio(result.rows[2], "bf16-triton") == 2.5
    assert result.expected(result.rows[-1]) == pytest.approx(5.0)
    assert result.ratio(result.rows[3]) is None and result.expected(result.rows[0]) is None


def test_tables_and_record_hold_every_figure():
    result = example()
    text, record = result.text(), result.payload()
    assert "| 1x8k | int2 | 250 | 4.00 | " in text and "6.50" in text
    assert "1.10" in text.split("One decode step")[1]
    assert result.failed == ["vq: it | broke", "decode 2x8k int2: no figure (HTTP 500)"]
    assert all(line in text for line in ("- vq: it", "- decode 2x8k int2"))
    again = json.loads(json.dumps(record))
    assert [row["bf16_ratio"] for row in again["rows"]][:3] == [0.8, 1.0, 2.0]
    assert again["arms"][2]["problem"] and again["rows"][-1]["expected_ms"] == pytest.approx(5.0)


def test_drawings_are_files_of_their_own(tmp_path):
    written = write_charts(example(), tmp_path / "charts")
    assert [path.name for path in written] == ["decode.svg", "split.svg"]
    for path in written:
        root = xml.dom.minidom.parse(str(path)).documentElement  # noqa: S318 - our own file
        assert root.getAttribute("xmlns") == "http://www.w3.org/2000/svg"
        assert root.getElementsByTagName("style")
        assert "int2" in path.read_text() and "bf16-flashinfer" in path.read_text()
    assert draw_kind(ServeBenchResult(), "decode") == ""
