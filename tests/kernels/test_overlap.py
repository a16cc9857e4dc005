"""Dependent launches are asked for where the device and the library have them, and nowhere else."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import triton

from kvcq.kernels import decode_kernel, merge
from kvcq.kernels.cuda import launch
from kvcq.kernels.overlap import overlap_of


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


@pytest.mark.parametrize("module", [merge, decode_kernel])
def test_kernels_wait_before_they_store_and_read_only_constants_above(module: object) -> None:
    tree = ast.parse(inspect.getsource(module))  # type: ignore[arg-type]
    waiting = 0
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        calls = sorted(
            ((node.lineno, ast.unparse(node.func), node) for node in ast.walk(function) if isinstance(node, ast.Call)),
            key=lambda call: call[0],
        )
        waits = [line for line, name, _ in calls if name == "await_last"]
        if not waits:
            continue
        waiting += 1
        assert len(waits) == 1
        above = [name for line, name, _ in calls if line < waits[0]]
        assert not {"tl.load", "tl.store"} & set(above)
        assert "start_next" in {name for _, name, _ in calls}
    assert waiting == (3 if module is merge else 1)
