"""bench serve: BF16 and bundles through SGLang, one server after the other, on one machine."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path

from kvcq.errors import InputError, Interrupted, KvcqError, MismatchError, UnavailableError
from kvcq.models.weightless import shape_config
from kvcq.pipeline.bench.record import check_out, save_record, try_place
from kvcq.pipeline.bench_serve.arms import Running, arguments, arms_of, run_arm
from kvcq.pipeline.bench_serve.cells import parse_cells
from kvcq.pipeline.bench_serve.charts import DRAWN, chart_path, check_charts, write_charts
from kvcq.pipeline.bench_serve.measure import Plan, measure_arm
from kvcq.pipeline.bench_serve.model import Subject, check_model, make_subject, open_bundles
from kvcq.pipeline.bench_serve.request import ServeBenchRequest
from kvcq.pipeline.bench_serve.result import BF16, ArmRecord, ServeBenchResult
from kvcq.pipeline.bench_serve.roofline import make_bound
from kvcq.pipeline.bench_serve.synthetic import KINDS
from kvcq.pipeline.progress import SILENT, Reporter
from kvcq.pipeline.sglang.arguments import masked, read_given
from kvcq.pipeline.sglang.machine import Machine, check_gpus, this_machine
from kvcq.pipeline.versions import installed
from kvcq.reports.text import plural
from kvcq.runtime.sglang.versions import INSTEAD

VERSIONS = ("kvcq", "torch", "triton", "flashinfer-python")
COMMAND, DTYPES = "bench serve", ("auto", "bfloat16")
# Options by the field of SGLang that they set.
OWN = {
    "model_path": "--model",
    "context_length": "--max-context",
    "max_running_requests": "--max-running",
    "dtype": "--dtype",
}


def bench_serve(
    request: ServeBenchRequest, reporter: Reporter = SILENT, *, machine: Machine | None = None
) -> ServeBenchResult:
    """Start the server of every arm in turn and measure the cells.

    An arm that does not start, or a cell that fails, is recorded with its reason, and the others go on. The record is
    written anew after every cell, so that an end from outside loses one cell only.

    Args:
        request: What.
        reporter: Receives progress, the servers' own lines and every row.
        machine: What this machine has; None asks it.

    Raises:
        InputError: cells, arms, flags or outputs that are none.
        UnavailableError: no SGLang or no GPU.
        CorruptArtifactError: a damaged bundle.
    """
    begin = time.monotonic()
    plan = read_plan(request)
    _check(request)
    if request.dry_run:
        open_bundles(request.bundles, reporter)
        return ServeBenchResult(plan=_dry(request, plan))
    ranks = read_given(request.arguments).number("tp_size", 1)
    with _without_another_engine():
        machine = machine or this_machine()
        check_gpus(machine, ranks)
    _try_places(request)
    with tempfile.TemporaryDirectory(prefix="kvcq-bench-") as folder:
        subject = make_subject(request, Path(folder), reporter)
        result = ServeBenchResult(_machine(machine), _told(request, subject), _settings(request, subject))
        plan = replace(plan, recent=subject.recent)
        bound = make_bound(subject, request.bandwidth, ranks)

        def keep() -> None:
            result.seconds = time.monotonic() - begin
            if request.out is not None:
                with _lenient(result, "--out", reporter):
                    save_record(result.payload(), request.out)

        for arm in arms_of(request, subject):

            def measure(running: Running) -> None:
                result.arms.append(
                    ArmRecord(
                        running.arm.name,
                        running.arm.backend,
                        running.capacity,
                        running.most,
                        running.cell,
                        dict(running.record),
                    )
                )
                keep()
                for row in measure_arm(running, plan, bound, reporter):
                    result.rows.append(row)
                    (reporter.warn if row.problem else reporter.note)(row.line())
                    keep()

            problem = None
            try:
                with _saying_what_is_kept(result, request.out):
                    run_arm(arm, request, subject, machine, measure, reporter)
            except KvcqError as error:
                problem = str(error)
            if problem is not None:
                reporter.warn(f"{arm.name}: {problem}")
                _record(result, ArmRecord(arm.name, arm.backend, problem=problem))
            keep()
    if request.charts is not None:
        with _lenient(result, "--charts", reporter):
            write_charts(result, request.charts)
    return result


@contextmanager
def _without_another_engine() -> Iterator[None]:
    """Say what is missing to serve with SGLang, but not what serving could do instead."""
    try:
        yield
    except (UnavailableError, MismatchError) as error:
        fix, other, _ = (error.fix or "").partition(f", {INSTEAD}")
        fix = fix if other else "run it on a machine with such GPUs"
        raise type(error)(error.what, where=f"kvcq {COMMAND}", fix=fix) from None


@contextmanager
def _lenient(result: ServeBenchResult, flag: str, reporter: Reporter) -> Iterator[None]:
    """Let what cannot be written any more cost nothing that was measured; the result says so once."""
    try:
        yield
    except KvcqError as error:
        problem = f"{flag}: {error}"
        if problem not in result.problems:
            result.problems.append(problem)
            reporter.warn(problem)


@contextmanager
def _saying_what_is_kept(result: ServeBenchResult, out: Path | None) -> Iterator[None]:
    """Let an end by a signal say where the rows are that were measured before it."""
    try:
        yield
    except (KeyboardInterrupt, Interrupted) as stop:
        measured = plural(len(result.rows), "figure")
        stop.add_note(f"without --out {measured} are lost" if out is None else f"{measured} are in {out}")
        raise


def _try_places(request: ServeBenchRequest) -> None:
    """Find out before the first server that figures could not be kept."""
    if request.out is not None:
        try_place(request.out)
    if request.charts is not None:
        for kind in DRAWN:
            try_place(chart_path(request.charts, kind))


def _record(result: ServeBenchResult, failed: ArmRecord) -> None:
    """Tell why an arm has no more rows; it may have come up before."""
    before = next((arm for arm in result.arms if arm.name == failed.name), None)
    if before is not None:
        result.arms.remove(before)
        failed = replace(before, problem=failed.problem)
    result.arms.append(failed)


def read_plan(request: ServeBenchRequest) -> Plan:
    """Read the cells of a request.

    Raises:
        InputError: one that is none, or none at all.
    """
    plan = Plan(
        cells=parse_cells(request.cells, "--cells", full=True),
        prompts=parse_cells(request.prompts, "--prompts"),
        hits=parse_cells(request.hits, "--hits"),
        jobs=parse_cells(request.jobs, "--jobs"),
        splits=parse_cells(request.splits, "--splits"),
        filled=request.filled,
        output=request.output,
        job_output=request.job_output,
        seed=request.seed,
    )
    if not plan.count:
        raise InputError("nothing to measure", where="--cells", fix="for example --cells 1x8k,fullx30k --filled")
    return plan


def _check(request: ServeBenchRequest) -> None:
    """Refuse before servers are started what could not be measured or kept."""
    if (request.model is None) == (request.synthetic is None):
        raise InputError("name a model or a shape, not both", where="--model", fix="or --synthetic qwen3-8b")
    if request.model is not None:
        check_model(request.model)
    if request.synthetic is None:
        if request.layers is not None:
            raise InputError("only a synthetic model has other layers", where="--layers", fix="leave it out")
    elif request.bundles:
        raise InputError("a synthetic model has bundles of its own", where="--bundle", fix="leave it out")
    else:
        shape_config(request.synthetic, request.layers)
    for kind in request.kinds:
        if kind not in KINDS:
            raise InputError(f"{kind!r} is no kind", where="--kinds", fix=f"use {', '.join(KINDS)}")
    for flag, names in (("--bf16", request.bf16), ("--kinds", request.kinds)):
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise InputError(f"{twice[0]} is named twice", where=flag, fix="name it once")
    for path in request.bundles:
        if path.stem.startswith(BF16):
            raise InputError(f"{path.stem} would be taken for BF16", where="--bundle", fix="rename the bundle")
    if request.dtype not in DTYPES:
        raise InputError(f"{request.dtype!r} is not served", where="--dtype", fix=f"use {' or '.join(DTYPES)}")
    if not request.bf16 and not request.bundles and not (request.synthetic and request.kinds):
        raise InputError("no arm", where="--bf16", fix="use triton,flashinfer, or name bundles")
    for flag, number in (
        ("--output", request.output),
        ("--job-output", request.job_output),
        ("--max-running", request.max_running),
    ):
        if number < 1:
            raise InputError(f"{number} is too few", where=flag, fix="use 1 or more")
    if not (isfinite(request.bandwidth) and request.bandwidth > 0):
        raise InputError(f"{request.bandwidth:g} GB/s", where="--bandwidth", fix="use the read rate of the memory")
    given = read_given(request.arguments, COMMAND, OWN)
    if "load_format" in given.values and request.synthetic is not None:
        raise InputError("--load-format is set by --synthetic", where="--load-format", fix="leave it out")
    check_out(request.out, request.force)
    if request.charts is not None:
        check_charts(request.charts, request.force)


def _dry(request: ServeBenchRequest, plan: Plan) -> list[str]:
    model = request.model if request.synthetic is None else f"synthetic {request.synthetic}"
    bundles = [path.stem for path in request.bundles] if request.synthetic is None else list(request.kinds)
    arms = [*(f"bf16-{backend}" for backend in request.bf16), *bundles]
    lines = [
        f"{model}: {plural(len(arms), 'server')} in turn, {', '.join(arms)}",
        f"{plural(plan.count, 'figure')} of each",
    ]
    for name, cells in (
        ("decode", plan.cells),
        ("prefill", plan.prompts),
        ("prefix hits", plan.hits),
        ("jobs", plan.jobs),
        ("splits", plan.splits),
    ):
        if cells:
            lines.append(f"{name}: {', '.join(cell.label for cell in cells)}")
    return lines


def _machine(machine: Machine) -> dict[str, str]:
    found = {"device": machine.gpus[0].name, "SGLang": machine.sglang}
    return found | {name: version for name in VERSIONS if (version := installed(name)) is not None}


def _told(request: ServeBenchRequest, subject: Subject) -> str:
    filled = "; contexts are random rows put into the cache, not prefilled, unless a row says otherwise"
    return subject.label + (filled if request.filled else "")


def _settings(request: ServeBenchRequest, subject: Subject) -> dict[str, object]:
    plain = asdict(request)
    for name in ("out", "charts", "force", "dry_run", "model", "bundles"):
        del plain[name]
    # Records are passed on: no key is in them.
    return plain | {"arguments": masked(request.arguments), "flags": masked(arguments(request, subject))}
