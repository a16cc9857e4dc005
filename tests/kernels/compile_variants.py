"""Compile what a kernel file launches for sm_90, which needs no GPU. Run as a process of its own: no interpreter here.

Usage: python -m tests.kernels.compile_variants decode 0/2 [all]

Compiles every second variant from the first one on. Of long lists it takes as many as have each value of each constant,
with vector codes and without; with `all` all of them.
"""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHORT = 24
HOPPER = GPUTarget("cuda", 90, 32)

Variant = tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]


def values(variant: Variant) -> set[tuple[str, ...]]:
    """Return kernel, codes, name and value of each constant."""
    _, kernel, _, constants, options = variant
    codes = str(constants.get("VQ"))
    return {(kernel.__name__, codes, name, str(value)) for name, value in {**constants, **options}.items()}


def covering(variants: list[Variant]) -> list[Variant]:
    """Return few variants that have every value of every constant: each time the one with most that are missing."""
    if len(variants) <= SHORT:
        return variants
    missing = set().union(*map(values, variants))
    chosen = []
    while missing:
        best = max(variants, key=lambda variant: len(values(variant) & missing))
        chosen.append(best)
        missing -= values(best)
    return chosen


def main(module: str, part: str, which: str = "covering") -> int:
    """Compile, print a line each, and return 1 if one does not compile."""
    index, parts = map(int, part.split("/"))
    found = importlib.import_module(f"kvcq.kernels.{module}").variants()
    failed = 0
    for name, kernel, signature, constants, options in (found if which == "all" else covering(found))[index::parts]:
        types = {**signature, **dict.fromkeys(constants, "constexpr")}
        begin = time.monotonic()
        try:
            source = ASTSource(kernel, {arg: types[arg] for arg in kernel.arg_names}, constants)
            built = triton.compile(source, target=HOPPER, options=options)
            print(f"{name}: {time.monotonic() - begin:.1f} s, {built.metadata.shared} B shared", flush=True)
        except Exception as error:
            failed = 1
            lines = [line for line in str(error).splitlines() if "error" in line.lower()] or [str(error)]
            print(f"FAILED {name}: {type(error).__name__}: {lines[0][:300]}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
