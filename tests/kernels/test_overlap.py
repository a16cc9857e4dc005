"""Dependent launches: where they are asked for, what kernels may do before they wait, and that bits stay the same."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from kvcq.kernels import attention, decode, decode_kernel, merge, merge_kernel
from kvcq.kernels.attention import Decoder
from kvcq.kernels.cuda import decode as cuda_decode
from kvcq.kernels.cuda import launch
from kvcq.kernels.overlap import overlap_of
from kvcq.kernels.reference import reference_decode
from kvcq.kernels.select import BACKENDS, Backend
from kvcq.pipeline.bench.candidate import poison
from kvcq.pipeline.bench.layers import build_step, random_queries
from kvcq.pipeline.bench.shapes import Shape
from kvcq.pipeline.bench.verdict import captured
from tests.kernels.build import relative_error


@pytest.mark.parametrize(
    ("device", "capability", "interpret", "wanted"),
    [
        ("cpu", (9, 0), False, False),
        ("cuda", (8, 9), False, False),
        ("cuda", (9, 0), True, False),
        ("cuda", (9, 0), False, True),
        ("cuda", (12, 0), False, True),
    ],
)
def test_overlap_needs_hopper_and_a_compiler(
    device: str, capability: tuple[int, int], interpret: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with monkeypatch.context() as patched:
        patched.setattr(triton.knobs.runtime, "interpret", interpret)
        found = overlap_of(torch.device(device))
    assert found == ({"OVERLAP": True, "launch_pdl": True} if wanted else {"OVERLAP": False})


@dataclass
class Old:
    grid: int
    block: int
    shmem_size: int


@dataclass
class New(Old):
    programmatic_stream_serialization: bool = False


@pytest.mark.parametrize("kind", [Old, New])
def test_a_launch_overlaps_where_the_library_can(kind: type[Old], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "core", lambda: SimpleNamespace(LaunchConfig=kind))
    launch.config.cache_clear()
    assert launch.config(3, 128, 10) == kind(3, 128, 10)
    assert launch.config(3, 128, 10, True) == (New(3, 128, 10, True) if kind is New else Old(3, 128, 10))
    launch.config.cache_clear()


# What kernels may touch before they wait: numbers of the launch and constants of the layer. Who lets the next one come
# before it waits itself, and who after: the merge reads constants above its wait, which is right behind a kernel that
# has waited for all that ran before.
ABOVE = {
    "join_kernel": {"dual", "total"},
    "mix_kernel": {"q_heads"},
    "rotate_kernel": {"dual", "total"},
    "decode_kernel": set(),
}
WAITS_FIRST = {"decode_kernel"}
HARMLESS = {"start_next", "tl.program_id", "tl.num_programs", "tl.arange", "_columns"}
SOURCES = {module.__name__.rsplit(".", 1)[1]: inspect.getsource(module) for module in (merge_kernel, decode_kernel)}
DECODE_CU = (Path(inspect.getfile(launch)).parent / "decode.cu").read_text("utf-8")


def problems(source: str) -> list[str]:
    """What in the kernels of a Triton file that overlap is against the protocol."""
    found = []
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    kernels = [one for one in functions if "OVERLAP" in {arg.arg for arg in one.args.args}]
    for kernel in kernels:
        calls = [
            (node.lineno, ast.unparse(node.func))
            for part in kernel.body
            for node in ast.walk(part)
            if isinstance(node, ast.Call)
        ]
        # Not in a branch: statements of the kernel itself.
        own = [(part.lineno, ast.unparse(part)) for part in kernel.body]
        waits, starts = (
            [line for line, text in own if text == f"{name}(OVERLAP)"] for name in ("await_last", "start_next")
        )
        if len(waits) != 1 or len(starts) != 1:
            found.append(f"{kernel.name}: {len(waits)} waits, {len(starts)} starts")
            continue
        wait = waits[0]
        if (wait < starts[0]) != (kernel.name in WAITS_FIRST):
            found.append(f"{kernel.name}: order of wait and start")
        free = ABOVE[kernel.name] | {arg.arg for arg in kernel.args.args if arg.annotation is not None}
        pointers = {arg.arg for arg in kernel.args.args} - free
        above = [node for part in kernel.body for node in ast.walk(part) if getattr(node, "lineno", wait) < wait]
        found += [f"{kernel.name}: return above the wait" for node in above if isinstance(node, ast.Return)]
        found += [
            f"{kernel.name}: {node.id} above the wait"
            for node in above
            if isinstance(node, ast.Name) and node.id in pointers
        ]
        found += [
            f"{kernel.name}: {name} above the wait" for line, name in calls if line < wait and name not in HARMLESS
        ]
    return found


def problems_in_cuda(source: str) -> list[str]:
    """The same of the decode kernel in CUDA: it waits before it lets the next come, and reads nothing above."""
    body = source[source.index('extern "C" __global__') :]
    body = body[body.index("{") :]
    wait, start = (body.find(f'asm volatile("griddepcontrol.{name};"') for name in ("wait", "launch_dependents"))
    if min(wait, start) < 0 or source.count("griddepcontrol.") != 2:
        return ["not one wait and one start"]
    found = [] if wait < start else ["order of wait and start"]
    if not body[wait:].startswith('asm volatile("griddepcontrol.wait;" ::: "memory");'):
        found.append("a wait that loads may be moved over")
    above = body[: min(wait, start)]
    return found + [f"{word} above the wait" for word in ("return", "[", "*", "->", "ldg", "asm", "(") if word in above]


@pytest.mark.parametrize("name", SOURCES)
def test_kernels_wait_before_they_touch_what_launches_write(name: str) -> None:
    assert problems(SOURCES[name]) == []
    assert SOURCES[name].count("    await_last(OVERLAP)") == (3 if name == "merge_kernel" else 1)
    assert problems_in_cuda(DECODE_CU) == []


WAIT, START = "    await_last(OVERLAP)\n", "    start_next(OVERLAP)\n"
REQUEST, BEGIN = "    request = t // GROUP\n", "    begin = tl.load(first + request)\n"
ROW = "    row = tl.program_id(0)\n    head = row % q_heads\n    request = row // q_heads\n"
HOPPER = "#if __CUDA_ARCH__ >= 900\n  // What"


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("decode_kernel", WAIT + START, START + WAIT, "order of wait and start"),
        ("decode_kernel", WAIT, "    if unit > 0:\n        return\n" + WAIT, "return above the wait"),
        ("decode_kernel", WAIT, "    kind = tl.load(items)\n" + WAIT, "items above the wait"),
        ("decode_kernel", WAIT, "    place = pages + 1\n" + WAIT, "pages above the wait"),
        ("decode_kernel", WAIT, "    if unit > 0:\n    " + WAIT, "0 waits, 1 starts"),
        ("decode_kernel", START, "", "1 waits, 0 starts"),
        ("merge_kernel", WAIT + REQUEST, REQUEST + "    x = tl.load(nu)\n" + WAIT, "nu above the wait"),
        ("merge_kernel", WAIT + BEGIN, BEGIN + WAIT, "first above the wait"),
        ("merge_kernel", START + ROW + WAIT, WAIT + ROW + START, "order of wait and start"),
    ],
)  # fmt: skip
def test_kernels_against_the_protocol_are_seen(name: str, old: str, new: str, said: str) -> None:
    assert old in SOURCES[name]
    assert any(said in problem for problem in problems(SOURCES[name].replace(old, new, 1)))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("griddepcontrol.wait;", "griddepcontrol.launch_dependents;", "not one wait and one start"),
        (HOPPER, "if (item < 0) return;\n" + HOPPER, "return above"),
        (HOPPER, "int4 w = items[item];\n" + HOPPER, "[ above"),
        ('.wait;" ::: "memory"', '.wait;"', "may be moved over"),
    ],
)  # fmt: skip
def test_a_cuda_kernel_against_the_protocol_is_seen(old: str, new: str, said: str) -> None:
    assert old in DECODE_CU
    assert any(said in problem for problem in problems_in_cuda(DECODE_CU.replace(old, new, 1)))
    for wait, start in (("wait", "launch_dependents"), ("launch_dependents", "wait")):
        swapped = DECODE_CU.replace(f"griddepcontrol.{wait}", "@").replace(
            f"griddepcontrol.{start}", f"griddepcontrol.{wait}"
        )
        assert "order of wait and start" in problems_in_cuda(swapped.replace("@", f"griddepcontrol.{start}"))


LAYERS, REPLAYS, WINDOW = 8, 50, 500


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [3, 40], ids=["few", "many"])
@pytest.mark.parametrize("codec", ["int2", "vq"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_that_overlap_write_what_layers_one_by_one_do(
    backend: Backend, codec: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two windows with a plan in the middle, and partial results that all layers share."""
    torch.manual_seed(batch)
    step = build_step(codec, Shape(batch, 1500, 64, 32, 8), LAYERS)
    queries, device = random_queries(step), step.device
    decoder = Decoder.reserve(step.tables[0], step.caches[0].windows, 32, batch, 1500, device, backend=backend)
    if backend == "cuda":
        # The few take two launches of the merge, the many one.
        assert (decoder.work.parts <= merge.JOINED_ITEMS * batch) == (batch == 40)
    outs = [torch.full_like(q, torch.nan) for q in queries]

    def layers(after: Callable[[], object]) -> None:
        for i, (tables, cache, q, out) in enumerate(zip(step.tables, step.caches, queries, outs, strict=True)):
            if i % (LAYERS // 2) == 0:
                decoder.plan(step.requests, WINDOW if i else None)
                after()
            decoder.decode(tables, cache, step.requests, q, out, scaling=step.scaling)
            after()

    with monkeypatch.context() as patched:
        for module in (merge, decode, cuda_decode):
            patched.setattr(module, "overlap_of", lambda device: {"OVERLAP": False})
        for name in ("decode_partials", "decode_partials_cuda", "merge"):
            patched.setattr(attention, name, awaited(getattr(attention, name)))
        layers(torch.cuda.synchronize)
    serial = [out.clone() for out in outs]
    arrays = (step.tables[-1], step.caches[-1], step.requests, queries[-1])
    wanted = reference_decode(*arrays, scaling=step.scaling, window=WINDOW)
    assert relative_error(serial[-1], wanted) < 2e-3
    layers(lambda: None)
    replay = captured(lambda: layers(lambda: None))
    for _ in range(REPLAYS):
        poison([*outs, decoder.partials.o, decoder.partials.ml, decoder.partials.mixed, decoder.partials.mass])
        replay()
        assert all(torch.equal(one, two) for one, two in zip(outs, serial, strict=True))


def awaited(run: Callable[..., None]) -> Callable[..., None]:
    def launch_alone(*arguments: Any, **options: Any) -> None:
        run(*arguments, **options)
        torch.cuda.synchronize()

    return launch_alone
