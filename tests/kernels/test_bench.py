"""bench kernels where it runs without a GPU: shapes, bytes, refusals, peers, tables; and the whole on one, small."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvcq.errors import InputError, ResourceError, UnavailableError, UnsupportedError
from kvcq.kernels.reference import reference_extend
from kvcq.kernels.stream import BLOCKS, read_all, reference_read_all, sums_for
from kvcq.pipeline.bench import candidate, decode, extend, layers, measure, run, write
from kvcq.pipeline.bench.baselines import Baseline
from kvcq.pipeline.bench.candidate import Candidate, poison
from kvcq.pipeline.bench.layers import Step
from kvcq.pipeline.bench.peers import load_peers
from kvcq.pipeline.bench.result import BenchResult, Row
from kvcq.pipeline.bench.run import bench
from kvcq.pipeline.bench.shapes import (
    DECODE,
    EXTEND,
    MOST_LAYERS,
    OPS,
    PREFILL,
    ROTATED_BYTES,
    Shape,
    cases,
    layers_for,
    parse_shape,
    parse_shapes,
)
from kvcq.pipeline.bench.timing import Timing
from kvcq.pipeline.progress import SILENT
from kvcq.pipeline.requests import BenchRequest
from kvcq.runtime.layout import page_bytes
from kvcq.spec.codec import CodecSpec
from kvcq.spec.plan import Windows
from tests.scripts import load_benchmark

CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


@pytest.mark.parametrize("shape", DECODE, ids=lambda shape: shape.label)
def test_labels_read_back(shape: Shape) -> None:
    assert parse_shape(shape.label) == shape


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("1x8k", Shape(1, 8192)),
        ("3x1000", Shape(3, 1000)),
        ("32x32k@64", Shape(32, 32768, 64, 64, 8)),
        ("32x32k@128:64/8", Shape(32, 32768, 128, 64, 8)),
        (" 2x4k@96:24/8 ", Shape(2, 4096, 96, 24, 8)),
    ],
)
def test_shapes_are_read(text: str, shape: Shape) -> None:
    assert parse_shape(text) == shape and parse_shape(shape.label) == shape


@pytest.mark.parametrize(
    "text", ["", "8k", "0x8k", "1x0", "1x8m", "1x8k@65", "1x8k@128:30/8", "1x8k@128:32/0", "1x8k@8"]
)
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--shapes"):
        parse_shape(text)


def test_given_shapes_replace_the_default_ones_and_count_once() -> None:
    assert parse_shapes(()) == DECODE
    assert parse_shapes(("1x8k", "2x4k", "1x8192")) == (Shape(1, 8192), Shape(2, 4096))


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("d", [64, 128])
def test_bytes_of_a_cache_are_those_of_the_layout(groups: int, d: int) -> None:
    side, shape = CodecSpec(groups=groups), Shape(3, 1000, d)
    assert shape.cache_bytes(groups) == 3 * 16 * shape.heads * page_bytes(side, side, d, d)


def test_read_bytes_hold_codes_and_windows() -> None:
    # 32448 coded tokens of 72 bytes and 320 exact ones of 512, 8 heads, 32 requests.
    assert Shape(32, 32768).read_bytes(1) == 32 * 8 * (32448 * 72 + 320 * 512)
    assert Shape(1, 100).read_bytes(1) == Shape(1, 100).bf16_bytes == 8 * 100 * 512


def test_layers_walk_over_half_a_gigabyte() -> None:
    for shape in DECODE:
        layers = layers_for(shape.read_bytes(1))
        assert layers * shape.read_bytes(1) >= ROTATED_BYTES and layers <= MOST_LAYERS
    assert layers_for(10 * ROTATED_BYTES) == 1 and layers_for(1) == MOST_LAYERS


def test_cases_follow_the_operations() -> None:
    assert [op for op, _ in cases(OPS, DECODE[:1])] == ["decode", "append", "prefill", "extend", "extend", "extend"]
    assert [shape.label for _, shape in cases(("extend",), ())] == ["1x512+28k", "1x4k+28k", "1x8k+28k"]
    assert PREFILL.label == "1x8k" and all(shape.context - shape.chunk == 28672 for shape in EXTEND)


@pytest.mark.parametrize("block", BLOCKS)
def test_reading_reads_everything(block: tuple[int, int], device: torch.device) -> None:
    data = torch.randint(-(1 << 30), 1 << 30, (3 * block[0],), dtype=torch.int32, device=device)
    sums = sums_for(data, block)
    read_all(data, sums, block)
    assert torch.equal(sums, reference_read_all(data, block))


def test_reading_refuses_other_data() -> None:
    data, block = torch.zeros(4096, dtype=torch.int32), BLOCKS[0]
    with pytest.raises(ValueError, match="int32"):
        read_all(data.float(), sums_for(data, block), block)
    with pytest.raises(ValueError, match="4096 elements are not 2 programs"):
        read_all(data, torch.zeros(2, dtype=torch.int32), block)


@CPU_ONLY
def test_without_a_gpu_only_the_dry_run_works(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"CUDA .*bench kernels.*--dry-run"):
        bench(BenchRequest(out=tmp_path / "it.json"))
    plan = bench(BenchRequest(dry_run=True, shapes=("32x32k",), ops=("decode",)))
    assert plan.text() == (
        "decode 32x32k: d 128, heads 32/8, 610 MiB a layer with windows (4.0 GiB in BF16)"
    )  # fmt: skip
    assert plan.payload() == {"kind": "bench", "plan": plan.plan} and not list(tmp_path.iterdir())


def test_devices_that_are_too_old_and_a_missing_triton_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(UnsupportedError, match=r"need compute capability 8\.0, this is 7\.5"):
        run.check_device()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    run.check_device()
    monkeypatch.setattr(run, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="triton is not installed"):
        run.check_device()


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"ops": ("decode", "merge")}, "--ops"),
        ({"codecs": ("int3",)}, "--codecs"),
        ({"codecs": (), "dry_run": True}, "--codecs"),
        ({"ops": (), "dry_run": True}, "--ops"),
        ({"shapes": ("big",)}, "--shapes"),
        ({"repeats": 0}, "--repeats"),
        ({"out": Path("it.md")}, "--out"),
    ],
)
def test_wrong_requests_name_the_flag(changes: dict, flag: str) -> None:
    with pytest.raises(InputError, match=flag):
        bench(BenchRequest(**changes))


def test_an_output_is_replaced_only_on_demand(tmp_path: Path) -> None:
    out = tmp_path / "it.json"
    out.write_text("{}")
    with pytest.raises(InputError, match="--force"):
        bench(BenchRequest(out=out, dry_run=True))
    assert bench(BenchRequest(out=out, dry_run=True, force=True)).plan


def test_an_output_that_cannot_be_written_ends_the_run_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> BenchResult:
        raise AssertionError("measured")

    monkeypatch.setattr(run, "check_device", lambda: None)
    monkeypatch.setattr(measure, "measure", never)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"it\.json"):
        bench(BenchRequest(out=tmp_path / "file" / "it.json"))


def test_a_record_that_does_not_fit_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run, "check_device", lambda: None)
    monkeypatch.setattr(measure, "measure", lambda *_: sample())
    bench(BenchRequest(out=tmp_path / "new" / "it.json"))
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ResourceError, match="No space left"):
        bench(BenchRequest(out=tmp_path / "other.json"))
    assert [path.name for path in tmp_path.rglob("*.*")] == ["it.json"]


def test_a_shape_that_is_too_large_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(shape: Shape, *_: object) -> Iterator[Row]:
        if shape.batch > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore of it.")
        yield Row("decode", shape, "int2", "cuda", Timing(10.0, 9.0, 11.0, 1))

    for name, instead in {
        "free": lambda: None,
        "read_ceiling": lambda repeats: (4500.0, [4500.0]),
        "describe_device": lambda: {"device": "none"},
        "baselines": lambda *_: [],
        "choice_of": lambda *_: "cuda",
        "decode_rows": rows,
    }.items():
        monkeypatch.setattr(measure, name, instead)
    plan = [("decode", Shape(batch, 64)) for batch in (1, 4000, 1)]
    result = measure.measure(BenchRequest(codecs=("int2",), ops=("decode",)), plan, SILENT)
    assert [row.timing is None for row in result.rows] == [False, True, False] and not result.wrong
    assert "not timed: decode 4000x64 - all that follow: CUDA out of memory.\n" in result.text()


@CPU_ONLY
def test_a_group_without_a_kernel_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(codec: str, shape: Shape, count: int) -> Step:
        return layers.build_step(codec, shape, count, device="cpu", dtype=torch.float16)

    monkeypatch.setattr(decode, "build_step", build)
    assert decode.choice_of("int2", Shape(1, 64, 64, 24, 1)).startswith("torch (no decode kernel: 24 query heads")


def test_peers_are_files_with_prepare(tmp_path: Path) -> None:
    good, empty, broken = (tmp_path / f"{name}.py" for name in ("good", "empty", "broken"))
    good.write_text("def prepare(shape):\n    return lambda: shape.batch\n")
    empty.write_text("")
    broken.write_text("import nothing_of_this_name\n")
    (peer,) = load_peers([f"mine={good}"])
    assert peer.name == "mine" and peer.prepare(Shape(7, 64))() == 7
    for text in (str(good), "mine=", f"mine={tmp_path}", f"mine={empty}", f"mine={broken}", "mine=/no/such.py"):
        with pytest.raises(InputError, match="--peer"):
            load_peers([text])


def test_every_target_is_measured_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_benchmark(monkeypatch, "kernels")
    assert {(target.op, target.shape) for target in script.TARGETS} <= {
        (op, shape.label) for op, shape in cases(OPS, DECODE)
    }
    found = {target.name: (value, holds) for target, value, holds in script.reached(sample())}
    assert found["INT2 against BF16"] == (pytest.approx(6.05), True)
    assert found["INT2 against the kernel of OSCAR"] == (pytest.approx(1070.3 / 160), True)
    assert not any(name.startswith("VQ") for name in found)
    assert all(target.kernel for target in script.TARGETS if target.op == "decode" and target.codec == "vq")
    assert not script.restricted(BenchRequest(ops=("decode", "write", "extend"), codecs=("int2", "vq")))
    for changes in ({"shapes": ("1x8k",)}, {"ops": ("decode",)}, {"codecs": ("vq",)}):
        assert script.restricted(BenchRequest(**changes))
    assert {target.against for target in script.TARGETS if target.op == "extend"} == {"flash"}
    shape = next(shape for shape in EXTEND if shape.label == "1x4k+28k")
    rows = [
        Row("extend", shape, "bf16", "flash", Timing(6000.0, 6000.0, 6000.0, 4), None, 4000.0),
        Row("extend", shape, "int2", "triton", Timing(6600.0, 6600.0, 6600.0, 4), None, 4000.0),
    ]
    for given, wanted in ((rows, [(pytest.approx(1.1), True)]), (rows[1:], [])):
        assert [(value, holds) for _, value, holds in script.reached(BenchResult(rows=given))] == wanted


def sample() -> BenchResult:
    """A run of three rows: a baseline, a kernel, a wrong one."""
    shape = Shape(32, 32768)
    rows = [
        Row("decode", shape, "bf16", "SDPA cuDNN", Timing(968.0, 960.0, 970.0, 1), shape.bf16_bytes, 968.0),
        Row("decode", shape, "int2", "cuda", Timing(160.0, 159.0, 161.5, 1), shape.read_bytes(1), 968.0, 1.7e-3),
        Row("decode", shape, "vq", "triton", None, shape.read_bytes(1), 968.0, 0.1, "relative error 1e-1", True),
    ]
    return BenchResult({"device": "a GPU"}, 4500.0, [4400.0, 4500.0], rows, {"int2 32x32k": "cuda: measured"}, 12.3)


def test_the_table_shows_rates_ratios_and_what_is_wrong() -> None:
    text = sample().text()
    assert "| 32x32k | int2 | cuda | 160.0 | 159.0 .. 161.5 | 4000 | 89 | 89 | 6.05 | 1.7e-03 |" in text
    assert (
        "| 32x32k | vq | triton | wrong |" in text
        and "- not timed: decode 32x32k vq triton: relative error 1e-1" in text
    )
    assert "Read ceiling, measured: 4500 GB/s (4400, 4500)" in text and text.endswith("12 s in all")
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {11}


def test_the_record_holds_every_figure_of_the_table() -> None:
    record = json.loads(json.dumps(sample().payload()))
    found = record["rows"][1]
    assert (found["label"], found["us"], found["batch"], found["d"]) == ("32x32k", 160.0, 32, 128)
    assert found["bf16_ratio"] == pytest.approx(6.05) and found["of_bound"] == pytest.approx(0.889, abs=1e-3)
    assert record["rows"][2]["us"] is None and record["rows"][2]["wrong"] and len(sample().wrong) == 1


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype) -> Callable[..., Step]:
    """Steps that the interpreter computes in a second."""
    for module in (layers, extend):
        monkeypatch.setattr(module, "WINDOWS", Windows(sink=4, recent=16))

    def build(codec: str, chunk: int = 1, fill: bool = True) -> Step:
        return layers.build_step(codec, Shape(2, 90, 64, 4, 2, chunk), 2, fill=fill, device=device, dtype=dtype)

    return build


def check(found: Candidate) -> None:
    """Run a candidate on poisoned outputs."""
    poison(found.outs)
    for call in found.calls:
        call()
    assert found.error is None or found.error() <= found.limit


@pytest.mark.parametrize("codec", ["int2", "vq", "int2x4"])
def test_what_is_timed_computes_what_it_is_compared_with(small: Callable[..., Step], codec: str) -> None:
    step = small(codec)
    queries = layers.random_queries(step)
    for rotate in (True, False):
        check(decode.candidate(step, queries, "triton", rotate, decode.expected(step, queries[0], rotate)))
    check(decode.query_candidate(step, queries))
    check(decode.plan_candidate(step))
    assert decode.plan_candidate(step).error is None
    check(extend.candidate(small(codec, chunk=20)))
    for chunk in (True, False):
        check(write.candidate(small(codec, fill=False), chunk=chunk))


def test_parts_of_a_chunk_are_what_they_are_in_the_whole(small: Callable[..., Step]) -> None:
    step = small("int2", chunk=40)
    q, rows = layers.random_queries(step)[0], (step.random(80, 2, 64), step.random(80, 2, 64))
    oldest = extend.oldest_by_query(50, 40, extend.WINDOWS).repeat(2)
    starts = torch.tensor([0, 40, 80])
    arrays = (step.tables[0], step.caches[0], step.requests, q, rows)
    whole = reference_extend(*arrays, starts=starts, oldest=oldest, scaling=step.scaling)
    part = extend.expected(step, q, rows, oldest, 30, 40)
    assert torch.allclose(part, torch.cat([whole[30:40], whole[70:80]]), atol=1e-9)


def test_a_kernel_that_leaves_something_out_is_seen(small: Callable[..., Step]) -> None:
    step = small("int2")
    queries = layers.random_queries(step)
    found = decode.candidate(step, queries, "triton", True, decode.expected(step, queries[0], True))
    poison(found.outs)
    assert found.error is not None and found.error() == math.inf


@CPU_ONLY
def test_a_run_joins_baselines_kernels_and_peers(
    small: Callable[..., Step], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def build(codec: str, shape: Shape, count: int, *, fill: bool = True) -> Step:
        return layers.build_step(codec, shape, min(count, 2), fill=fill, device="cpu", dtype=torch.float16)

    def once(calls: list[Callable[[], object]], repeats: int, captured: Callable[[], object] = dict) -> Timing:
        captured()
        for call in calls:
            call()
        return Timing(10.0, 9.0, 11.0, len(calls))

    for module in (decode, extend, write):
        monkeypatch.setattr(module, "build_step", build)
    for module in (candidate, measure):
        monkeypatch.setattr(module, "time_calls", once)
        monkeypatch.setattr(module, "free", lambda: None)
    monkeypatch.setattr(measure, "read_ceiling", lambda repeats: (4500.0, [4500.0]))
    monkeypatch.setattr(measure, "describe_device", lambda: {"device": "none"})
    monkeypatch.setattr(measure, "baselines", lambda *_: [Baseline("a library", Timing(60.0, 60.0, 60.0, 1))])
    peer = tmp_path / "peer.py"
    peer.write_text("def prepare(shape):\n    return lambda: None\n")
    shape = Shape(2, 90, 64, 4, 2)
    plan = [("decode", shape), ("append", shape), ("extend", Shape(1, 90, 64, 4, 2, chunk=20))]
    request = BenchRequest(codecs=("int2",), ops=("decode", "write", "extend"), peers=(f"mine={peer}",))
    result = measure.measure(request, plan, SILENT)
    assert not result.wrong and list(result.choices) == ["int2 2x90@64:4/2"]
    found = {(row.op, row.codec, row.kernel): row.ratio for row in result.rows if row.timing}
    for key in (("decode", "int2", "triton"), ("append", "int2", "triton"), ("peer", "-", "mine")):
        assert found[key] == 6.0
    assert found["extend", "bf16", "a library"] == 1.0
    (refused,) = (row for row in result.rows if row.kernel == "cuda")
    assert refused.timing is None and refused.problem and not refused.wrong
    assert "not timed: decode 2x90@64:4/2 int2 cuda" in result.text()


@pytest.mark.gpu
def test_a_small_run_is_right_and_complete(tmp_path: Path) -> None:
    out = tmp_path / "it.json"
    result = bench(BenchRequest(shapes=("3x2k", "2x1k@64"), ops=("decode",), repeats=2, out=out))
    assert not result.wrong and result.ceiling and json.loads(out.read_text())["rows"]
    assert {row.codec for row in result.rows if row.timing} >= {"bf16", "int2", "vq"}
