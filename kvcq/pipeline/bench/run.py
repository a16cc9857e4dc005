"""bench kernels: check what this machine's kernels compute, then time them beside BF16 attention."""

from __future__ import annotations

from importlib.util import find_spec

from kvcq.errors import InputError, UnavailableError, UnsupportedError
from kvcq.kernels.select import LOWEST_CAPABILITY
from kvcq.pipeline.bench.check_cases import CASES
from kvcq.pipeline.bench.layers import CODECS
from kvcq.pipeline.bench.record import check_out, save_record, try_place
from kvcq.pipeline.bench.result import BenchResult
from kvcq.pipeline.bench.shapes import OPS, Shape, cases, layers_for, parse_shapes
from kvcq.pipeline.progress import SILENT, Reporter
from kvcq.pipeline.requests import BenchRequest
from kvcq.pipeline.versions import installed
from kvcq.reports.text import size


def bench(request: BenchRequest, reporter: Reporter = SILENT) -> BenchResult:
    """Check and time the kernels.

    Every kernel is compared with float64 over the dequantized cache first; one that is wrong is not timed, and its row
    says so. Ragged batches of all codecs are checked beside, before anything is timed. BF16 is the fastest of the
    libraries' kernels in the same run.

    Raises:
        InputError: shapes, operations, codecs, peers or an output that do not exist or may not be replaced.
        UnavailableError: no CUDA device.
        UnsupportedError: a device on which no kernel was tested.
    """
    _check(request)
    shapes = parse_shapes(request.shapes)
    plan = cases(request.ops, shapes)
    if request.dry_run:
        checks = list(dict.fromkeys(f"check {case.label}" for case in CASES)) if "check" in request.ops else []
        return BenchResult(plan=[*checks, *(_line(op, shape) for op, shape in plan)])
    check_device()
    if request.out is not None:
        try_place(request.out)
    from kvcq.pipeline.bench.measure import measure

    result = measure(request, plan, reporter)
    if request.out is not None:
        save_record({**result.payload(), "kvcq": installed("kvcq")}, request.out)
    return result


def check_device() -> None:
    """Refuse to begin where nothing can be timed.

    Raises:
        UnavailableError: torch is built without CUDA, or sees no device, or there is no Triton.
        UnsupportedError: HIP, or a device that is too old.
    """
    import torch

    fix = "run it on a machine with an NVIDIA GPU; --dry-run lists the shapes"
    if torch.version.hip is not None:
        raise UnsupportedError(f"kernels are not tested on HIP {torch.version.hip}", where="bench kernels", fix=fix)
    if torch.version.cuda is None:
        raise UnavailableError(f"torch {torch.__version__} is built without CUDA", where="bench kernels", fix=fix)
    if not torch.cuda.is_available():
        raise UnavailableError("torch sees no CUDA device", where="bench kernels", fix=fix)
    found = torch.cuda.get_device_capability()
    if found < LOWEST_CAPABILITY:
        lowest, this = (".".join(map(str, capability)) for capability in (LOWEST_CAPABILITY, found))
        raise UnsupportedError(
            f"kernels need compute capability {lowest}, this is {this}", where="bench kernels", fix=fix
        )
    if find_spec("triton") is None:
        raise UnavailableError("triton is not installed", where="bench kernels", fix="pip install triton")


def _check(request: BenchRequest) -> None:
    for flag, given, known in (("--ops", request.ops, OPS), ("--codecs", request.codecs, CODECS)):
        if not given:
            raise InputError("nothing is chosen", where=flag, fix=f"use {', '.join(known)}")
    for op in request.ops:
        if op not in OPS:
            raise InputError(f"{op!r} is no operation", where="--ops", fix=f"use {', '.join(OPS)}")
    for codec in request.codecs:
        if codec not in CODECS:
            raise InputError(f"{codec!r} is no codec", where="--codecs", fix=f"use {', '.join(CODECS)}")
    if request.repeats < 1:
        raise InputError(f"{request.repeats} repeats", where="--repeats", fix="use 1 or more")
    check_out(request.out, request.force)


def _line(op: str, shape: Shape) -> str:
    coded, exact = shape.read_bytes(1), shape.bf16_bytes
    layers = layers_for(coded) if op == "decode" else 1
    return (
        f"{op} {shape.label}: d {shape.d}, heads {shape.q_heads}/{shape.heads}, {size(coded)} a layer with windows "
        f"({size(exact)} in BF16)" + (f", {layers} layers" if layers > 1 else "")
    )
