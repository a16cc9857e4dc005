"""Kernels of this machine beside BF16 attention, and on demand beside the figures that they are built for.

Usage: python benchmarks/kernels.py [--shapes 1x8k,32x32k] [--ops check,decode,write,extend] [--codecs int2,vq]
           [--repeats 10] [--out kernels.json] [--targets]

The tables are those of `kvcq bench kernels`. The targets hold for one H200: d 128, 32 query and 8 KV heads unless the
shape says more, exact windows 64/256 included. Ends with 1 if a kernel is wrong, or with --targets if a figure is
missed, or was not measured although nothing restricts shapes, operations or codecs; the last line then says how many
were reached.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvcq import BenchRequest, bench
from kvcq.cli.console import Console
from kvcq.pipeline.bench.baselines import FLASH
from kvcq.pipeline.bench.result import BenchResult, Row
from kvcq.pipeline.requests import BOUND_GBS

OPS, CODECS = ("decode", "write", "extend"), ("int2", "vq")


@dataclass(frozen=True)
class Target:
    """One figure: at least `goal` times faster than BF16, or another figure as its name says.

    `against` names the BF16 kernel that it is compared with; None: the best of the run.
    """

    name: str
    op: str
    codec: str
    shape: str
    goal: float
    value: Callable[[Row], float | None] = lambda row: row.ratio
    kernel: str | None = None
    most: bool = False
    against: str | None = None


def of_bound(row: Row) -> float | None:
    """Return the rate as a share of the bound."""
    return None if row.rate is None else row.rate / BOUND_GBS


def of_bf16(row: Row) -> float | None:
    """Return the time as a multiple of that of BF16."""
    return None if row.ratio is None else 1 / row.ratio


def faster_than(us: float) -> Callable[[Row], float | None]:
    """Return how many times faster a row is than a kernel of somebody else that took so many microseconds."""
    return lambda row: None if row.timing is None else us / row.timing.us


# Decode at 32x32k of the published kernels, each with its best cut, on the same kind of device in another run.
OSCAR_US, NOVA_US = 1070.3, 828.1

INT2 = (("32x32k", 5.3), ("8x32k", 4.8), ("128x8k", 4.5), ("32x8k", 4.1), ("1x100k", 3.8), ("32x32k@64", 3.3))
TARGETS = (
    *(Target("INT2 against BF16", "decode", "int2", shape, goal) for shape, goal in INT2),
    Target("INT2, share of the bound", "decode", "int2", "32x32k", 0.80, of_bound),
    Target("INT2 in Triton, share of the bound", "decode", "int2", "32x32k", 0.70, of_bound, "triton"),
    Target("VQ against BF16", "decode", "vq", "32x32k", 3.9, kernel="cuda"),
    Target("VQ against BF16", "decode", "vq", "1x100k", 2.8, kernel="cuda"),
    Target("VQ in Triton against BF16", "decode", "vq", "32x32k", 1.9, kernel="triton"),
    Target("INT2 against the kernel of OSCAR", "decode", "int2", "32x32k", 5.0, faster_than(OSCAR_US)),
    Target("VQ against the kernel of NOVA", "decode", "vq", "32x32k", 3.4, faster_than(NOVA_US), "cuda"),
    Target("append INT2, share of BF16 decode", "append", "int2", "128x8k", 0.06, of_bf16, most=True),
    Target("append VQ, share of BF16 decode", "append", "vq", "128x8k", 0.12, of_bf16, most=True),
    Target("write INT2, share of BF16 prefill", "prefill", "int2", "1x8k", 0.10, of_bf16, most=True),
    Target("write VQ, share of BF16 prefill", "prefill", "vq", "1x8k", 0.10, of_bf16, most=True),
    Target("extend INT2, times flash", "extend", "int2", "1x4k+28k", 1.25, of_bf16, most=True, against=FLASH),
    Target("extend VQ, times flash", "extend", "vq", "1x4k+28k", 1.25, of_bf16, most=True, against=FLASH),
)


def reached(result: BenchResult) -> Iterator[tuple[Target, float, bool]]:
    """Yield each target that was measured, the best figure of its kernels, rotation included, and whether it holds."""
    for target in TARGETS:
        rows = [row for row in result.rows if _key(row) == target_key(target)]
        rows = [row for row in rows if target.kernel in (None, row.kernel) and "folded" not in row.kernel]
        if target.against is not None:
            rows = [replace(row, bf16_us=baseline_us(result, target)) for row in rows]
        values = [value for row in rows if (value := target.value(row)) is not None]
        if values:
            found = min(values) if target.most else max(values)
            yield target, found, found <= target.goal if target.most else found >= target.goal


def baseline_us(result: BenchResult, target: Target) -> float | None:
    """Return the time of the BF16 kernel that a target names, None where it was not timed."""
    wanted = (target.op, "bf16", target.shape, target.against)
    times = [row.timing.us for row in result.rows if row.timing and (*_key(row), row.kernel) == wanted]
    return times[0] if times else None


def _key(row: Row) -> tuple[str, str, str]:
    return row.op, row.codec, row.shape.label


def target_key(target: Target) -> tuple[str, str, str]:
    """Return what a row must be for a target."""
    return target.op, target.codec, target.shape


def restricted(request: BenchRequest) -> bool:
    """Tell whether a run measures less than all figures need."""
    return bool(request.shapes) or not (set(OPS) <= set(request.ops) and set(CODECS) <= set(request.codecs))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="")
    parser.add_argument("--ops", default="check,decode,write,extend")
    parser.add_argument("--codecs", default="int2,vq")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--targets", action="store_true")
    args = parser.parse_args()
    shapes, ops, codecs = (
        tuple(filter(None, text.split(","))) for text in (args.shapes, args.ops, args.codecs)
    )  # fmt: skip
    request = BenchRequest(shapes=shapes, ops=ops, codecs=codecs, repeats=args.repeats, out=args.out, force=True)
    with Console(verbose=True) as console:
        result = bench(request, console)
    print(result.text())
    failed = bool(result.problems)
    if args.targets:
        print("\n| figure | shape | target | reached | |\n|---|---|---|---|---|")
        figures = list(reached(result))
        for target, value, holds in figures:
            failed |= not holds
            sign = "<=" if target.most else ">="
            print(
                f"| {target.name} | {target.shape} | {sign} {target.goal:g} | {value:.3g} | {'' if holds else 'no'} |"
            )
        measured = {target for target, _, _ in figures}
        unmeasured = [target for target in TARGETS if target not in measured]
        failed |= bool(unmeasured) and not restricted(request)
        for target in unmeasured:
            print(f"| {target.name} | {target.shape} | {target.goal:g} | not measured | |")
        count = sum(holds for _, _, holds in figures)
        rest = f", {len(unmeasured)} not measured" if unmeasured else ""
        print(f"\nkvcq bench kernels: {count} of {len(TARGETS)} figures reached{rest}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
