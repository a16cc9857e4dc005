"""The whole of ``kvcq bench serve`` against a server process that behaves as SGLang does, or as one that is broken."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from kvcq.errors import EvaluationError, InputError, MismatchError, ResourceError, UnavailableError
from kvcq.pipeline.bench_serve import measure
from kvcq.pipeline.bench_serve import run as home
from kvcq.pipeline.bench_serve.arms import Arm, Running, arguments, plain_command
from kvcq.pipeline.bench_serve.cells import Cell
from kvcq.pipeline.bench_serve.client import Timeline, send
from kvcq.pipeline.bench_serve.model import Subject, make_subject
from kvcq.pipeline.bench_serve.prompts import body
from kvcq.pipeline.bench_serve.request import ServeBenchRequest
from kvcq.pipeline.bench_serve.rows import Row
from kvcq.pipeline.bench_serve.run import bench_serve
from kvcq.pipeline.progress import SILENT
from kvcq.pipeline.serve_sglang import serve_sglang
from kvcq.pipeline.sglang.arguments import BENCH, read_given
from kvcq.pipeline.sglang.request import SglangRequest
from kvcq.runtime.sglang import versions
from kvcq.runtime.sglang.filled import KEY, PARAM
from tests.bench_serve.traces import CLASSES, LENGTH
from tests.serve_sglang.conftest import MACHINE, argv_of


def test_every_kind_of_cell_is_measured_in_every_arm(run, tmp_path):
    out = tmp_path / "new" / "serve.json"
    result, told = run(
        cells=("1x1k", "fullx1k"),
        prompts=("2x512",),
        hits=("2x1k",),
        jobs=("4x512",),
        splits=("1x1k", "2x1k"),
        filled=True,
        kinds=("int2", "vq"),
        out=out,
        charts=tmp_path / "charts",
    )
    assert [arm.name for arm in result.arms] == ["bf16-triton", "int2", "vq"] and not result.failed
    assert [(arm.capacity, arm.cell) for arm in result.arms] == [(1600, 4096), (6400, 576), (6400, 576)]
    assert [line.split(":")[0] for line in told.warnings] == ["split 2x1k bf16-triton"] and len(result.rows) == 3 * 9
    rows = {(row.kind, row.arm, row.cell): row for row in result.rows}
    one, full = rows[("decode", "int2", "1x1k")], rows[("decode", "int2", "fullx1k")]
    # The stub takes two milliseconds for a token, however many run.
    assert one.filled and one.ttft_ms is None and 2.0 <= one.step_ms < 20
    assert (one.running, full.requests, full.running) == (1, 5, 5) and full.tokens_per_s > 2 * one.tokens_per_s
    other = rows[("decode", "bf16-triton", "fullx1k")]
    assert other.requests == 1
    assert result.ratio(full) == pytest.approx(full.tokens_per_s / other.tokens_per_s)
    # Weights of one layer and of the head, and a few rows of the cache, at 4.5 TB/s.
    assert one.bound_ms == pytest.approx((1_630_535_680 + (1024 + 12 - 320) * 576 + 320 * 4096) / 4.5e9, rel=0.01)
    prefill = rows[("prefill", "int2", "2x512")]
    assert not prefill.filled and prefill.ttft_ms > 0 and prefill.prefill_per_s > 0 and prefill.hit_share == 0
    shares = [rows[("hits", "vq", f"2x1k {share}%")].hit_share for share in (0, 50, 100)]
    assert shares == [0, 0.5, 0.75]
    split, wide = (rows[("split", "int2", cell)] for cell in ("1x1k", "2x1k"))
    assert split.step_ms == pytest.approx(LENGTH / 1000) and split.classes_us == pytest.approx(CLASSES)
    assert result.expected(split) == pytest.approx(split.step_ms)
    # BF16 holds one such request: a step of one is not compared with a step of two.
    fewer = rows[("split", "bf16-triton", "2x1k")]
    assert (wide.running, fewer.running, fewer.problem) == (2, 1, "1 of 2 requests fit")
    assert result.expected(wide) is None and result.ratio(wide) is None
    job = rows[("job", "vq", "4x512")]
    assert job.running == 4 and job.tokens_per_s == pytest.approx(4 * 24 / job.wall_s)
    record = json.loads(out.read_text())
    settings = record["settings"]
    assert len(record["rows"]) == 27 and settings["filled"] is True and "--load-format" in settings["flags"]
    assert [path.name for path in sorted((tmp_path / "charts").iterdir())] == ["decode.svg", "hits.svg", "split.svg"]
    assert "random weights" in result.text() and "not prefilled" in result.text()


def test_what_matters_most_is_measured_first(run):
    options = {"cells": ("1x256",), "prompts": ("1x256",), "hits": ("1x512",), "jobs": ("1x256",), "splits": ("1x256",)}
    result, _ = run(kinds=(), **options)
    assert [row.kind for row in result.rows] == ["decode", "split", "prefill", *["hits"] * 3, "job"]


def test_a_profiler_that_does_not_start_or_end_costs_its_cell_only(run, monkeypatch):
    monkeypatch.setattr(measure, "TRACE_SECONDS", 0.3)
    for way, words in (("no_profiler", "HTTP 500"), ("no_trace", "no trace within"), ("profiler_hangs", "no answer")):
        result, _ = run(way, cells=("1x256",), splits=("1x256",), prompts=("1x256",), kinds=())
        assert [row.kind for row in result.rows] == ["decode", "split", "prefill"]
        assert words in result.rows[1].problem and not result.rows[0].problem and not result.rows[2].problem, way


def test_a_step_that_is_traced_when_fewer_run_says_so(run, monkeypatch):
    profile = measure._profile

    async def late(http, folder):
        began, split = await profile(http, folder)
        return began + 60.0, split

    monkeypatch.setattr(measure, "_profile", late)
    result, _ = run(splits=("2x256",))
    assert [row.problem for row in result.rows] == ["only 0 of 2 requests ran all the time while it was traced"] * 2
    assert all(row.step_ms and row.running is None and row.bound_ms is None for row in result.rows)
    # Both say so, which does not make them alike.
    assert all(result.ratio(row) is None and result.expected(row) is None for row in result.rows)


def test_requests_that_fail_are_not_traced(run, monkeypatch):
    monkeypatch.setattr(measure, "TRACE_SECONDS", 30.0)
    begin = time.monotonic()
    result, _ = run("late_error", splits=("2x256",), kinds=())
    assert "2 of 2 requests failed" in result.rows[0].problem and time.monotonic() - begin < 25.0


def test_a_server_that_fills_contexts_serves_nobody(tiny):
    asked = SglangRequest(
        bundle=tiny.folder / "nova.kvcq",
        model=str(tiny.model),
        arguments=("--json-model-override-args", '{"kvcq_bench": {"filled": true}}'),
    )
    with pytest.raises(InputError, match="kvcq_bench is for kvcq bench serve"):
        serve_sglang(asked, machine=MACHINE)
    assert BENCH == KEY


def test_a_fitted_bundle_has_to_prove_itself(run, tiny):
    options = {"synthetic": None, "layers": None, "model": str(tiny.model), "dtype": "bfloat16"}
    options["bundles"] = (tiny.folder / "nova.kvcq",)
    result, _ = run(cells=("2x128",), **options)
    assert [arm.name for arm in result.arms] == ["bf16-triton", "nova"] and not result.failed
    assert result.arms[1].record["canary"] == pytest.approx(1.0, abs=0.2)
    result, told = run("bf16", cells=("2x128",), **options)
    assert "canary" in result.arms[1].problem and not [row for row in result.rows if row.arm == "nova"]
    assert any(line.startswith("nova: ") for line in told.warnings)


def test_a_server_that_does_not_fill_is_found_out(run):
    for way in ("no_fill", "half_filled"):
        result, told = run(way, cells=("1x1k",), filled=True)
        assert [row.filled for row in result.rows] == [False, False]
        assert all("only 0 of 768 tokens" in row.problem for row in result.rows) and len(told.warnings) == 2
        assert not result.failed  # there are figures, and a word with them


def test_one_arm_that_does_not_start_stops_no_other(run):
    result, told = run("no_flashinfer", bf16=("flashinfer", "triton"), cells=("1x256",))
    assert [(arm.name, arm.problem is None) for arm in result.arms] == [
        ("bf16-flashinfer", False),
        ("bf16-triton", True),
        ("int2", True),
    ]
    assert "placeholder" in result.arms[0].problem and len(result.rows) == 2
    assert len(result.failed) == 1 and "placeholder" in told.warnings[0]


@pytest.mark.parametrize(
    ("way", "arm", "words"),
    [
        ("other_backend", "bf16-triton", "attention_backend is 'fa3', not triton"),
        ("digest", "int2", "the digest of the bundle"),
        ("bytes", "int2", "bytes of a token"),
        ("kernels", "int2", "kernel for each layer"),
        ("bf16_server", "int2", "the plugin is not on"),
    ],
)
def test_a_server_that_is_something_else_is_not_measured(run, way, arm, words):
    result, _ = run(way, cells=("1x256",), layers=2)
    wrong = next(record for record in result.arms if record.name == arm)
    assert words in wrong.problem and arm not in {row.arm for row in result.rows}
    assert len(result.rows) == 1 and result.failed


def test_a_server_that_dies_while_it_is_measured_says_why(run):
    result, told = run("dies_measuring", cells=("1x256",))
    assert [arm.name for arm in result.arms] == ["bf16-triton", "int2"]
    for arm in result.arms:
        assert "SGLang ended with exit code 7: torch.AcceleratorError: an illegal memory access" in arm.problem
    assert not result.rows and len(told.warnings) == 2


def test_attention_past_the_kernels_while_measuring_is_found_out(run):
    result, _ = run("late_fallback", cells=("1x256",))
    assert result.arms[1].name == "int2" and "attention without the kernels" in result.arms[1].problem
    assert result.arms[1].capacity == 6400 and len(result.rows) == 2


def test_requests_that_fail_are_rows_with_a_reason(run, monkeypatch):
    monkeypatch.setattr(measure._Meter, "warm", lambda self: None)
    result, _ = run("stream_error", cells=("1x256",), prompts=("1x256",))
    assert len(result.rows) == 4 and all("boom" in row.problem for row in result.rows) and len(result.failed) == 4
    monkeypatch.setattr(measure, "FLUSH_SECONDS", 0.1)
    result, _ = run("no_flush", cells=("1x256",))
    assert all("flush" in row.problem for row in result.rows)
    result, _ = run(cells=("fullx64k",))
    assert all("holds no such request" in row.problem for row in result.rows)


def meter_of(plan):
    return measure._Meter(Running(Arm("bf16-triton", "triton"), "", None, 10000, 64, None, {}), plan, lambda *_: None)


def test_the_pool_is_filled_before_the_first_cell(monkeypatch):
    sent = []
    monkeypatch.setattr(measure, "send", lambda url, bodies, key: sent.append([json.loads(body) for body in bodies]))
    for filled in (False, True):
        sent.clear()
        meter_of(measure.Plan(cells=(Cell(1, 700),), filled=filled)).warm()
        assert [len(bodies) for bodies in sent] == [2, 2, 2][: 2 + filled]
        # Nothing is longer than what is measured: another context might not hold it.
        assert {len(body["input_ids"]) for bodies in sent for body in bodies} == {700}
    assert all(body["sampling_params"]["custom_params"] == {PARAM: 384} for body in sent[2])
    assert sent[0] == sent[1] and sent[2][0]["input_ids"] != sent[0][0]["input_ids"]


def test_prompts_of_a_cell_do_not_depend_on_the_cells_before_it(monkeypatch):
    few, many = meter_of(measure.Plan()), meter_of(measure.Plan())
    many._bodies("decode", Cell(1, 128), 1, 8)
    assert few._bodies("job", Cell(2, 256), 2, 8) == many._bodies("job", Cell(2, 256), 2, 8)
    assert few._bodies("job", Cell(2, 256), 2, 8) != few._bodies("split", Cell(2, 256), 2, 8)


def test_there_is_no_p99_of_means():
    meter, lines = meter_of(measure.Plan()), [Timeline(0.0, [(0.1 * n, n) for n in range(1, 9)], prompt=9)]
    p99 = {count: meter._timed(Row("decode", "a", "c", count, 9, 8), lines).itl_p99_ms for count in (16, 17)}
    assert p99 == {16: pytest.approx(100.0), 17: None}


def test_the_pool_may_hold_more_than_is_run(run):
    result, _ = run(cells=("fullx256",), max_running=2)
    assert [row.requests for row in result.rows] == [2, 2]
    assert all("--max-running" in row.problem and row.tokens_per_s for row in result.rows) and not result.failed


def test_no_key_is_in_a_record(run, tmp_path):
    out, secret = tmp_path / "a.json", "hunter-2"
    keys = ("--api-key", secret, f"--admin-api-key={secret}", "--ssl-keyfile-password", secret, "--log-level", "info")
    result, _ = run(cells=("1x256",), out=out, arguments=keys)
    assert not result.failed and len(result.rows) == 2
    assert secret not in out.read_text() and secret not in json.dumps(result.payload())
    shown = result.settings["arguments"]
    assert shown == ["--api-key", "***", "--admin-api-key=***", "--ssl-keyfile-password", "***", "--log-level", "info"]


def test_a_model_is_found_as_serving_finds_it(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tiny.model.parent))
    asked = ServeBenchRequest(model=f"~/{tiny.model.name}", cells=("1x8k",))
    subject = make_subject(asked, tmp_path, SILENT)
    assert subject.location == str(tiny.model) and subject.label == tiny.model.name and subject.weights
    assert bench_serve(replace(asked, dry_run=True)).plan
    quantized = ("--json-model-override-args", '{"quantization_config": {"bits": 4}}')
    assert make_subject(replace(asked, arguments=quantized), tmp_path, SILENT).weights is None
    broken = tmp_path / "broken"
    broken.mkdir()
    for text, words in ((None, "no config.json"), ('{"a": ', "config.json cannot be read"), ("[]", "cannot be read")):
        if text is not None:
            (broken / "config.json").write_text(text)
        for dry_run in (True, False):
            with pytest.raises(InputError, match=words):
                bench_serve(replace(asked, model=str(broken), dry_run=dry_run), machine=MACHINE)


def test_places_that_cannot_be_written_are_found_first(run, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    for places in ({"out": blocked / "a.json"}, {"charts": blocked}, {"charts": blocked / "charts"}):
        with pytest.raises(InputError):
            run(cells=("1x256",), **places)
    charts = tmp_path / "charts"
    charts.mkdir()
    (charts / "decode.svg").write_text("mine")
    with pytest.raises(InputError, match="--force"):
        run(cells=("1x256",), charts=charts)
    run(cells=("1x256",), kinds=(), charts=charts, force=True)
    assert (charts / "decode.svg").read_text() != "mine" and list(charts.iterdir()) == [charts / "decode.svg"]


def test_what_cannot_be_written_in_the_end_costs_no_table(run, tmp_path, monkeypatch):
    def full(*_):
        raise ResourceError("the disk is full", where="x")

    monkeypatch.setattr(home, "write_charts", full)
    monkeypatch.setattr(home, "save_record", full)
    result, told = run(cells=("1x256",), kinds=(), charts=tmp_path / "charts", out=tmp_path / "a.json")
    assert len(result.rows) == 1 and result.rows[0].tokens_per_s
    assert [line.partition(":")[0] for line in result.failed] == ["--out", "--charts"] and len(told.warnings) == 2
    assert "- --charts: the disk is full (x)" in result.text()


def test_every_arm_gets_the_same_flags(run, tmp_path, monkeypatch):
    monkeypatch.setenv("KVCQ_STUB_LOG", str(tmp_path / "argv"))
    run(cells=("1x256",), kinds=(), filled=True, arguments=("--mem-fraction-static", "0.8", "--api-key", "k"))
    argv = argv_of(tmp_path / "argv")
    assert argv[:4] == ["--mem-fraction-static", "0.8", "--api-key", "k"]
    told = dict(pairwise(argv))
    assert told["--load-format"] == "dummy" and told["--attention-backend"] == "triton"
    assert told["--cuda-graph-max-bs"] == told["--max-running-requests"] == "8"
    assert json.loads(told["--json-model-override-args"]) == {"kvcq_bench": {"filled": True}}
    run(cells=("1x256",), bf16=(), filled=True, arguments=("--mem-fraction-static", "0.8", "--api-key", "k"))
    ours = argv_of(tmp_path / "argv")
    shared = ("--mem-fraction-static", "--load-format", "--cuda-graph-max-bs", "--max-running-requests")
    other = dict(pairwise(ours))
    assert {name: other[name] for name in shared} == {name: told[name] for name in shared}
    overrides = json.loads(ours[len(ours) - 1 - ours[::-1].index("--json-model-override-args") + 1])
    assert overrides["kvcq_bench"] == {"filled": True} and "bundle" in overrides["kvcq"]


def test_what_a_user_sets_is_kept():
    request = ServeBenchRequest(
        model="m", arguments=("--cuda-graph-max-bs-decode", "4", "--json-model-override-args", '{"a": 1}'), filled=True
    )
    sizes = replace(request, arguments=("--cuda-graph-bs-decode", "1", "4"))
    assert "--cuda-graph-max-bs" not in arguments(sizes, Subject("m", "m", "m", {}))
    found = arguments(request, Subject("m", "m", "m", {}))
    assert found[:4] == request.arguments and "--cuda-graph-max-bs" not in found
    assert dict(pairwise(found))["--mem-fraction-static"] == "0.85"
    share = replace(request, arguments=("--mem-fraction-static", "0.7"))
    assert arguments(share, Subject("m", "m", "m", {})).count("--mem-fraction-static") == 1
    assert json.loads(found[-1]) == {"a": 1, "kvcq_bench": {"filled": True}}
    longer, given = replace(request, max_context=77), read_given(found)
    argv = plain_command(Arm("bf16-x", "x"), longer, Subject("m", "m", "m", {}), given, 5)
    assert argv[argv.index("--context-length") + 1] == "77" and "--load-format" not in argv


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": None}, "--model"),
        ({"synthetic": "qwen3-8b"}, "--model"),
        ({"layers": 3}, "--layers"),
        ({"model": None, "synthetic": "qwen3-9b"}, "qwen3-8b, qwen3-4b"),
        ({"model": None, "synthetic": "qwen3-8b", "bundles": (Path("x.kvcq"),)}, "--bundle"),
        ({"kinds": ("int3",)}, "--kinds"),
        ({"bf16": ()}, "no arm"),
        ({"cells": ()}, "nothing to measure"),
        ({"jobs": ("fullx8k",)}, "--jobs"),
        ({"output": 0}, "--output"),
        ({"bandwidth": 0.0}, "--bandwidth"),
        ({"bandwidth": float("nan")}, "--bandwidth"),
        ({"bandwidth": float("inf")}, "--bandwidth"),
        ({"bf16": ("triton", "triton")}, "triton is named twice"),
        ({"bundles": (Path("bf16-x.kvcq"),)}, "rename the bundle"),
        ({"dtype": "float16"}, "--dtype"),
        ({"model": "/no/such/folder"}, "no such model folder"),
        ({"arguments": ("--max-running-requests", "4")}, "set by kvcq bench serve"),
        ({"arguments": ("--revision", "x")}, "leave it out"),
        ({"out": Path("x.txt")}, "FILE.json"),
        ({"arguments": ("--page-size", "1")}, "--page-size"),
        ({"model": None, "synthetic": "qwen3-8b", "arguments": ("--load-format", "auto")}, "--load-format"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_server_starts(changes, words):
    with pytest.raises(InputError) as told:
        bench_serve(ServeBenchRequest(**{"model": "m", "cells": ("1x8k",)} | changes))
    assert words in str(told.value)


def test_an_output_is_replaced_only_if_asked(tmp_path):
    out = tmp_path / "a.json"
    out.write_text("{}")
    request = ServeBenchRequest(model="m", cells=("1x8k",), dry_run=True, out=out)
    with pytest.raises(InputError, match="--force"):
        bench_serve(request)
    plan = bench_serve(replace(request, force=True)).payload()["plan"]
    assert "2 servers in turn" in plan[0] and "decode: 1x8k" in plan


def test_a_dry_run_opens_bundles_and_nobody_is_sent_to_another_engine(tmp_path, monkeypatch):
    request = ServeBenchRequest(model="m", cells=("1x8k",), dry_run=True, bundles=(tmp_path / "none.kvcq",))
    with pytest.raises(InputError, match=r"none\.kvcq"):
        bench_serve(request)
    bare = replace(MACHINE, gpus=())
    with pytest.raises(UnavailableError, match=r"none found \(kvcq bench serve\): run it on a machine") as told:
        bench_serve(replace(request, dry_run=False), machine=bare)
    assert told.value.exit_code == 7
    old = replace(MACHINE, gpus=tuple(replace(gpu, capability=(7, 0)) for gpu in MACHINE.gpus))
    with pytest.raises(MismatchError, match=r"capability 7\.0, .*: run it on a machine with such GPUs"):
        bench_serve(replace(request, dry_run=False), machine=old)
    monkeypatch.setattr(versions, "installed", lambda: None)
    with pytest.raises(UnavailableError, match="CUDA GPU") as told:
        bench_serve(replace(request, dry_run=False))
    assert "--engine" not in str(told.value) and "kvcq[sglang]" in str(told.value)


def test_nobody_listening_is_a_failure_of_requests():
    with pytest.raises(EvaluationError, match="2 of 2 requests failed"):
        send("http://127.0.0.1:9", [body([1, 2], 3)] * 2)
