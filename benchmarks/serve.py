"""SGLang with bundles beside BF16, and on demand beside the figures that it is built for.

Usage: python benchmarks/serve.py first|full|job [--out serve.json] [--charts DIR] [--force] [--targets]
           [--layers N] [-- flags for SGLang]
       python benchmarks/serve.py --read serve.json [more.json ...]

Runs `kvcq bench serve` with cells that belong together; each is meant to take less than ten minutes on one H200:

    first     decoding behind 90k and 30k, the split of a step, one prompt; contexts are filled in
    full      decoding behind 90k and 30k, as many requests as fit, and the split of a step, contexts filled in; prompts
              that are computed, and prefix hits of 0, 50 and 100 %
    job       32 requests at 100k with the shape of Qwen3-4B; contexts are filled in

`--read` prints the tables and targets of runs that are over, or were cut short. `--targets` prints those of a run: they
hold for one H200 and the shape of Qwen3-8B with all its layers, unless they name another. Ends with 1 if something
failed or, with --targets or --read, a figure is missed. Ctrl-C and SIGTERM end a run in order: its server does not
outlive it, and what it has measured is in --out, for --read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from kvcq import ServeBenchRequest, bench_serve
from kvcq.cli.console import Console
from kvcq.cli.main import explain
from kvcq.errors import Interrupted, KvcqError
from kvcq.pipeline.bench_serve.result import BF16, ArmRecord, ServeBenchResult
from kvcq.pipeline.bench_serve.rows import Row

KINDS = ("cells", "splits", "prompts", "hits", "jobs")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Each is meant for one machine at a time; the shapes have all their layers unless they say otherwise.
RUNS = {
    "first": ServeBenchRequest(
        synthetic="qwen3-8b",
        cells=("1x90k", "4x90k", "fullx30k"),
        splits=("1x8k", "32x8k"),
        prompts=("1x8k",),
        filled=True,
        output=192,
        max_running=160,
    ),
    "full": ServeBenchRequest(
        synthetic="qwen3-8b",
        cells=("1x90k", "4x90k", "fullx90k", "fullx30k"),
        # BF16 has room for fewer than 90 requests at 8k, so a step of 128 has none of its own beside it.
        splits=("1x8k", "8x8k", "32x8k", "80x8k", "128x8k"),
        prompts=("1x8k", "4x8k", "1x32k"),
        hits=("16x8k",),
        filled=True,
        max_running=160,
    ),
    "job": ServeBenchRequest(synthetic="qwen3-4b", jobs=("32x100k",), filled=True, max_running=32),
}


@dataclass(frozen=True)
class Target:
    """One figure: at least, or at most, `goal`, of the best bundle in one cell, or in the worst of all cells.

    Attributes:
        name: What it is.
        kind: Of rows.
        cell: Of rows; None: every one.
        goal: The figure.
        read: From the result and a row to the figure.
        most: It is not to be exceeded.
        model: What the label of the model begins with.
    """

    name: str
    kind: str
    cell: str | None
    goal: float
    read: Callable[[ServeBenchResult, Row], float | None] = lambda result, row: result.ratio(row)
    most: bool = False
    model: str = "qwen3-8b"


def against_triton(result: ServeBenchResult, row: Row) -> float | None:
    """Return the ratio to BF16 with SGLang's own kernels."""
    return result.ratio(row, f"{BF16}triton")


def of_expected(result: ServeBenchResult, row: Row) -> float | None:
    """Return the step as a multiple of BF16's with only the attention replaced."""
    expected = result.expected(row)
    return None if expected is None or row.step_ms is None else row.step_ms / expected


TARGETS = (
    Target("decode, times the best BF16", "decode", "1x90k", 1.4),
    Target("decode, times BF16 with triton", "decode", "1x90k", 2.0, against_triton),
    Target("decode, times the best BF16", "decode", "4x90k", 2.0),
    Target("decode, as many as fit, times the best BF16", "decode", "fullx30k", 4.5),
    Target("decode, as many as fit, times the best BF16", "decode", "fullx90k", 4.5),
    Target("job, times the best BF16", "job", "32x100k", 5.5, model="qwen3-4b"),
    Target("step, of BF16's with our attention", "split", None, 1.15, of_expected, most=True),
    Target("prefill, times the best BF16", "prefill", None, 0.9),
)


def reached(result: ServeBenchResult) -> Iterator[tuple[Target, str, str, float, bool]]:
    """Yield each target that was measured with its cell, the best arm, its figure, and whether it holds."""
    for target in TARGETS:
        if not result.model.startswith(target.model):
            continue
        rows = [row for row in result.rows if row.kind == target.kind and target.cell in (None, row.cell)]
        for cell in dict.fromkeys(row.cell for row in rows):
            found = [
                (value, row.arm)
                for row in rows
                if row.cell == cell and not row.arm.startswith(BF16) and (value := target.read(result, row)) is not None
            ]
            if found:
                value, arm = min(found) if target.most else max(found)
                yield target, cell, arm, value, value <= target.goal if target.most else value >= target.goal


def print_targets(result: ServeBenchResult) -> bool:
    """Print a table and return whether all of it holds."""
    print("\n| figure | cell | arm | target | reached | |\n|---|---|---|---|---|---|")
    all_hold = True
    for target, cell, arm, value, holds in reached(result):
        all_hold &= holds
        sign = "<=" if target.most else ">="
        print(
            f"| {target.name} | {cell} | {arm} | {sign} {target.goal:g} | {value:.3g} | {'' if holds else 'no'} |",
            flush=True,
        )
    return all_hold


def read_result(paths: Sequence[Path]) -> Iterator[ServeBenchResult]:
    """Yield the results that runs have written, enough of them to print targets."""
    fields = {field.name for field in dataclasses.fields(Row)}
    for path in paths:
        plain: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        rows = [Row(**{name: value for name, value in row.items() if name in fields}) for row in plain["rows"]]
        arms = [ArmRecord(**arm) for arm in plain["arms"]]
        yield ServeBenchResult(plain["machine"], plain["model"], plain["settings"], arms, rows, plain["seconds"])


def ended(number: int, _: object) -> NoReturn:
    """End a run by a signal, but not without ending its server: a second one does not take that from it."""
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise Interrupted(number)


def main() -> int:
    """Measure, or read, and print."""
    own, flags = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, flags = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", choices=sorted(RUNS))
    parser.add_argument("--read", nargs="+", type=Path, default=[])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--charts", type=Path)
    parser.add_argument("--force", action="store_true", help="replace --out and --charts")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--bf16", default="triton,flashinfer")
    parser.add_argument("--kinds", default="int2,vq")
    for kind in KINDS:
        parser.add_argument(f"--{kind}", help="instead of the run's own")
    parser.add_argument("--output", type=int)
    parser.add_argument("--targets", action="store_true")
    args = parser.parse_args(own)
    if args.run is None and not args.read:
        parser.error("name a run, or --read")
    holds = True
    for result in read_result(args.read):
        print(result.text())
        holds &= print_targets(result)
    if args.run is None:
        return int(not holds)
    request = RUNS[args.run]
    lists = {name: getattr(args, name) for name in ("bf16", "kinds", *KINDS)}
    given: dict[str, Any] = {
        name: tuple(filter(None, text.split(","))) for name, text in lists.items() if text is not None
    }
    given |= {name: number for name in ("layers", "output") if (number := getattr(args, name)) is not None}
    request = replace(
        request,
        **given,
        out=args.out,
        charts=args.charts,
        force=args.force,
        arguments=tuple(flags),
    )
    for number in SIGNALS:
        # Under nohup and in the background some are ignored, and stay so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, ended)
    try:
        with Console(verbose=True) as console:
            result = bench_serve(request, console)
    except (Interrupted, KvcqError) as error:
        message, code = explain(error)
        print(f"error: {message}", file=sys.stderr, flush=True)
        return code
    print(result.text())
    failed = bool(result.failed)
    if args.targets:
        failed |= not print_targets(result)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
