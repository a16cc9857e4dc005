"""Every launch compiles for sm_90, and no kernel file waits for the device: the interpreter hides both mistakes."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvcq.kernels

ROOT = Path(kvcq.kernels.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# Files with a function `variants`: those that launch.
LAUNCHING = [path.stem for path in FILES if path.parent == ROOT and "\ndef variants(" in path.read_text("utf-8")]
PARTS = 4
# Each makes the host wait for the device, or is left over from debugging; the reference runs on the host anyway.
SYNCS = {"item", "tolist", "cpu", "numpy", "synchronize"}
HOST = {"reference.py"}


def compile_part(modules: str, part: str, which: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = (sys.executable, "-m", "tests.kernels.compile_variants", modules, part, which)
    return subprocess.run(
        words, env=environment, cwd=ROOT.parents[1], capture_output=True, text=True, check=False, timeout=600
    )


def check(modules: str, part: str, which: str) -> list[str]:
    """Compile without failure; return a line for each variant."""
    done = compile_part(modules, part, which)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert not failed, "\n".join(failed)
    assert done.returncode == 0, done.stderr[-2000:]
    # A short list has no more than its first parts.
    assert done.stdout.strip() or not part.startswith("0/"), done.stderr[-2000:]
    return done.stdout.splitlines()


def test_variants_of_every_kernel_compile_for_hopper() -> None:
    # In one process: libraries take longer to load than these to compile.
    told = check(",".join(LAUNCHING), "0/1", "few")
    assert {line.partition(" ")[0] for line in told} == set(LAUNCHING)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("module", "part"), [(name, f"{i}/{PARTS}") for name in LAUNCHING for i in range(PARTS)])
def test_every_variant_compiles_for_hopper(module: str, part: str) -> None:
    check(module, part, "all")


def test_every_file_that_launches_names_its_variants() -> None:
    def launches(path: Path) -> bool:
        tree = ast.parse(path.read_text("utf-8"))
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        return any(isinstance(call, ast.Subscript) for call in calls) and "triton.jit" in path.read_text("utf-8")

    assert [path.stem for path in FILES if launches(path) and path.stem not in LAUNCHING] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_kernels_and_launchers_never_wait_for_the_device(path: Path) -> None:
    calls = [node.func for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
    names = {call.attr for call in calls if isinstance(call, ast.Attribute)}
    names |= {call.id for call in calls if isinstance(call, ast.Name)}
    assert "print" not in names and "device_print" not in names
    assert path.name in HOST or not names & SYNCS
