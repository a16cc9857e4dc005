"""Compile what kernel files launch for sm_90, which needs no GPU. Run as a process of its own: no interpreter here.

Usage: python -m tests.kernels.compile_variants decode,merge 0/2 all|few

Compiles every second variant of each file from the first one on: of all of them, or of the few that differ most.
"""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FEW = 3
HOPPER = GPUTarget("cuda", 90, 32)

Variant = tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]


def values(variant: Variant) -> set[tuple[str, ...]]:
    """Return kernel, name and value of each constant."""
    _, kernel, _, constants, options = variant
    return {(kernel.__name__, name, str(value)) for name, value in {**constants, **options}.items()}


def few(variants: list[Variant]) -> list[Variant]:
    """Return the variants that differ most: each time the one with most values of constants that none had before."""
    missing = set().union(*map(values, variants))
    chosen: list[Variant] = []
    while missing and len(chosen) < FEW:
        chosen.append(max(variants, key=lambda variant: len(values(variant) & missing)))
        missing -= values(chosen[-1])
    return chosen


def main(modules: str, part: str, which: str) -> int:
    """Compile, print a line each, and return 1 if one does not compile."""
    index, parts = map(int, part.split("/"))
    return max([compile_module(module, index, parts, which) for module in modules.split(",")])


def compile_module(module: str, index: int, parts: int, which: str) -> int:
    """Do so for one file."""
    found = importlib.import_module(f"kvcq.kernels.{module}").variants()
    failed = 0
    for name, kernel, signature, constants, options in (found if which == "all" else few(found))[index::parts]:
        types = {**signature, **dict.fromkeys(constants, "constexpr")}
        begin = time.monotonic()
        try:
            source = ASTSource(kernel, {arg: types[arg] for arg in kernel.arg_names}, constants)
            built = triton.compile(source, target=HOPPER, options=options)
            print(f"{module} {name}: {time.monotonic() - begin:.1f} s, {built.metadata.shared} B shared", flush=True)
        except Exception as error:
            failed = 1
            lines = [line for line in str(error).splitlines() if "error" in line.lower()] or [str(error)]
            print(f"FAILED {module} {name}: {type(error).__name__}: {lines[0][:300]}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
