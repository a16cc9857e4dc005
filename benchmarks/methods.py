"""All methods side by side on one model: attention and perplexity for every method, needles for a few.

Usage: python benchmarks/methods.py --model MODEL --calibrate TEXT --data HELD_OUT --out OUT
           [--contexts 2048,4096] [--num-tokens 32768] [--seq-len 4096] [--passages 2] [--device auto] [--dtype auto]
           [--haystack TEXT] [--needle-methods nova oscar ...] [--needle-items 20] [--needle-tasks single_2 ...]
           [--methods NAME ...] [--chunk 512]

Collects into OUT/stats, fits every method at its defaults into OUT/fits and measures all of them by one validate into
OUT/report. Prints a Markdown table of attention and perplexity, and one of needles; OUT/table.md has the same text.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from kvcq import CollectRequest, FitRequest, ValidateRequest, collect, fit, validate
from kvcq.spec.report import ArtifactReport, Report

METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "naive-int2": ("naive-int2", ()),
    "quarot-int2": ("quarot-int2", ()),
    "klt-int2": ("klt-int2", ()),
    "saw-int4": ("saw-int4", ()),
    "turboquant-k3v3": ("turboquant", ()),
    "kivi": ("kivi", ()),
    "kitty": ("kitty", ()),
    "kvquant-nuq": ("kvquant-nuq", ()),
    "rotatekv": ("rotatekv", ()),
    "oscar": ("oscar", ()),
    "oscar-g4": ("oscar", ("groups=4",)),
    "oscar-lloyd": ("oscar-lloyd", ()),
    "oscar-vq": ("oscar-vq", ()),
    "oscar-centered": ("oscar-centered", ()),
    "nova-sq": ("nova-sq", ()),
    "nova": ("nova", ()),
}
LONG = 131072


def timed(text: str, start: float) -> None:
    """Tell how long a step took."""
    print(f"{text} in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def attention_table(report: Report, contexts: tuple[int, ...]) -> str:
    """Return attention KL, output error and perplexity of every artifact at every context."""
    head = ["artifact", *(f"KL {c}" for c in contexts), f"output error {contexts[-1]}"]
    head += [*(f"perplexity {c}" for c in contexts), "bits stored", f"bits at {LONG}"]
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for entry in report.artifacts:
        kl = {part.context: part.metrics for part in entry.contexts}
        cells = [entry.name, *(f"{kl[c].kl:.4g}" for c in contexts), f"{kl[contexts[-1]].output_error:.4g}"]
        cells += [perplexity(entry, c) for c in contexts]
        cells += [f"{entry.bits[str(c)]:.3f}" for c in (contexts[-1], LONG)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def perplexity(entry: ArtifactReport, context: int) -> str:
    """Return a perplexity with its ratio to BF16's."""
    scores = () if entry.tasks is None else entry.tasks.perplexity
    score = next(part for part in scores if part.context == context)
    return f"{score.perplexity:.4g} ({score.ratio:.3f}x)"


def needle_table(report: Report) -> str:
    """Return needles found by artifact: mean share, its interval, items with all needles, cut answers, subtasks."""
    first = report.artifacts[0].tasks
    tasks = [] if first is None or first.needle is None else sorted({cell.task for cell in first.needle.cells})
    head = ["artifact", "cache", "items", "found", "95 % CI", "all found", "cut", *tasks]
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for entry in report.artifacts:
        if entry.tasks is None or entry.tasks.needle is None:
            continue
        needle = entry.tasks.needle
        cells = [entry.name, entry.tasks.cache, str(len(needle.items)), f"{needle.score:.3f}"]
        cells += [f"{needle.interval.low:.2f} .. {needle.interval.high:.2f}", f"{needle.exact:.3f}"]
        cells.append(str(needle.truncated))
        for task in tasks:
            shares = [item.found / item.asked for item in needle.items if item.task == task]
            cells.append(f"{sum(shares) / len(shares):.2f}")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Run the steps that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibrate", action="append", required=True)
    parser.add_argument("--data", action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--contexts", default="2048,4096")
    parser.add_argument("--num-tokens", type=int, default=32768)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--passages", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--haystack", default="builtin:noise")
    parser.add_argument("--needle-methods", nargs="+", default=["nova", "oscar", "oscar-centered", "quarot-int2"])
    parser.add_argument("--needle-tasks", nargs="+", default=["single_2"])
    parser.add_argument("--needle-items", type=int, default=20)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    args = parser.parse_args()
    contexts = tuple(sorted(int(part) for part in args.contexts.split(",")))
    model = {"model": args.model, "device": args.device, "dtype": args.dtype}
    stats, fits = args.out / "stats", args.out / "fits"
    start = time.perf_counter()
    sizes = {"num_tokens": args.num_tokens, "seq_len": args.seq_len}
    collect(CollectRequest(**model, **sizes, data=tuple(args.calibrate), out=stats, force=True))
    timed("collected", start)
    for name in args.methods:
        begun = time.perf_counter()
        method, settings = METHODS[name]
        fit(FitRequest(stats=stats, out=fits / name, method=method, settings=settings, force=True))
        timed(f"fitted {name}", begun)
    begun = time.perf_counter()
    result = validate(
        ValidateRequest(
            **model,
            artifacts=tuple(fits / name for name in args.methods),
            data=tuple(args.data),
            out=args.out / "report",
            contexts=contexts,
            passages=args.passages,
            chunk=args.chunk,
            canary=(),
            tasks=("attention", "perplexity", "needle"),
            needle_artifacts=tuple(args.needle_methods),
            needle_lengths=contexts[-1:],
            needle_tasks=tuple(args.needle_tasks),
            needle_items=args.needle_items,
            haystack=args.haystack,
            force=True,
        )
    )
    timed("measured", begun)
    text = f"{attention_table(result.report, contexts)}\n{needle_table(result.report)}"
    (args.out / "table.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
