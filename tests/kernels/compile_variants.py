"""Compile what a kernel file launches for sm_90, which needs no GPU. Run as a process of its own: no interpreter here.

Usage: python -m tests.kernels.compile_variants decode 0/2: every second variant from the first one on.
"""

from __future__ import annotations

import importlib
import sys
import time

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)


def main(module: str, part: str) -> int:
    """Compile, print a line each, and return 1 if one does not compile."""
    index, parts = map(int, part.split("/"))
    failed = 0
    for name, kernel, signature, constants, options in list(
        importlib.import_module(f"kvcq.kernels.{module}").variants()
    )[index::parts]:
        types = {**signature, **dict.fromkeys(constants, "constexpr")}
        begin = time.monotonic()
        try:
            source = ASTSource(kernel, {arg: types[arg] for arg in kernel.arg_names}, constants)
            built = triton.compile(source, target=HOPPER, options=options)
            spills = "" if not getattr(built, "n_spills", 0) else f", {built.n_spills} spills"
            print(f"{name}: {time.monotonic() - begin:.1f} s, {built.metadata.shared} B shared{spills}", flush=True)
        except Exception as error:
            failed = 1
            lines = [line for line in str(error).splitlines() if "error" in line.lower()] or [str(error)]
            print(f"FAILED {name}: {type(error).__name__}: {lines[0][:300]}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
