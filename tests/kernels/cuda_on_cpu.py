"""Compile a CUDA source of `write` for the CPU, as `cuda_on_cpu.hpp` stands in for CUDA, and launch it on tensors."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from torch import Tensor

from kvcq.kernels.cuda.compile import RowsVariant, source

COMPILER = shutil.which("g++")
FLAGS = ("-O1", "-std=c++17", "-w", "-ffp-contract=off", "-march=native", "-shared", "-fPIC")
STANDIN = Path(__file__).with_name("cuda_on_cpu.hpp")
# A function of the sources that holds assembly, up to the brace that ends it at the start of a line or on its own line.
FUNCTION = r"(?:template <[^\n]*>\n)?__device__ __forceinline__ \w+ {}\([^{{]*(?:\{{[^\n]*\}}\n|\{{\n.*?\n\}}\n)"


def missing() -> str | None:
    """Say why nothing can be compiled here, None where it can."""
    if COMPILER is None:
        return "needs g++"
    probe = "#include <ucontext.h>\n_Float16 half(float x) { return (_Float16)x; }"
    words = (COMPILER, *FLAGS, "-x", "c++", "-fsyntax-only", "-")
    done = subprocess.run(words, input=probe, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else "needs a g++ with _Float16 and ucontext.h"


def without_assembly(text: str) -> str:
    """Return the source without what `cuda_on_cpu.hpp` defines."""
    defined = re.findall(r"^static [\w ]+?(\w+)\(", STANDIN.read_text("utf-8"), re.MULTILINE)
    for name in defined:
        text = re.sub(FUNCTION.format(name), "", text, count=1, flags=re.DOTALL)
    assert "asm" not in re.sub(r"//[^\n]*", "", text)
    return text.replace("extern __shared__ uint4 shared[];", "")


def compiled(variant: RowsVariant, folder: Path) -> Any:
    """Compile a variant; the library has one function, `launch`."""
    text = without_assembly(source(variant.sources))
    found = re.search(variant.entry + r"\((.*?)\) \{", text, re.DOTALL)
    assert found
    types = [re.sub(r"\w+$", "", part.strip()) for part in found[1].split(",")]
    values = ", ".join(f"({kind})arguments[{i}]" for i, kind in enumerate(types))
    macros = "".join(f"#define {name} {value}\n" for name, value in variant.macros.items())
    name = folder / f"{variant.entry}_{variant.head_dim}_{variant.team}"
    call = f"\nstatic void call() {{ {variant.entry}({values}); }}\n"
    name.with_suffix(".cpp").write_text(macros + STANDIN.read_text("utf-8") + text + call, "utf-8")
    words = (str(COMPILER), *FLAGS, "-o", str(name.with_suffix(".so")), str(name.with_suffix(".cpp")))
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    return ctypes.CDLL(str(name.with_suffix(".so")))


def launch(library: Any, variant: RowsVariant, grid: tuple[int, int, int], values: list[Tensor | int | None]) -> None:
    """Run all blocks of a launch, one after the other."""
    numbers = [v.data_ptr() if isinstance(v, Tensor) else v or 0 for v in values]
    library.launch(*grid, 32 * variant.shape.warps, (ctypes.c_long * len(numbers))(*numbers))
