"""The tables of docs/benchmarks.md from the JSON that `benchmarks/kernels.py --out kernels.json` writes.

Usage: python benchmarks/kernels_docs.py kernels.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SIDES = (("int2", "cuda"), ("int2", "triton"), ("vq", "cuda"), ("vq", "triton"))
NAMES = ("INT2 CUDA", "INT2 Triton", "VQ CUDA", "VQ Triton")
FLASH, MAP = "flash", "queries into the frame"


class Run:
    """Rows of one run by operation, shape, codec and kernel."""

    def __init__(self, path):
        self.rows = [row for row in json.loads(path.read_text())["rows"] if row["us"] is not None]

    def shapes(self, op):
        """Return the shapes that an operation was timed at, in their order."""
        return list(dict.fromkeys(row["label"] for row in self.rows if row["op"] == op))

    def of(self, op, shape, codec):
        """Return rows by kernel."""
        found = (row for row in self.rows if (row["op"], row["label"], row["codec"]) == (op, shape, codec))
        return {row["kernel"]: row for row in found}

    def best(self, op, shape):
        """Return the fastest BF16 kernel."""
        return min(self.of(op, shape, "bf16").values(), key=lambda row: row["us"])

    def map_us(self, shape, codec):
        """Return the time that mapping the queries takes beside decode."""
        return next(
            row["us"] for row in self.rows if (row["label"], row["codec"], row["kernel"]) == (shape, codec, MAP)
        )


def us(value):
    """Return microseconds as a table shows them."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def table(head, rows):
    """Print a table."""
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for row in rows:
        print("| " + " | ".join(row).replace("%", " %") + " |")
    print()


def decode(run):
    """Print decode, and the ratios with the map of the queries."""
    head = ["batch x context", "BF16", "fastest"]
    for name in NAMES:
        head += [name, "share", "ratio"]
    rows, mapped = [], []
    for shape in run.shapes("decode"):
        best = run.best("decode", shape)
        line = [shape, us(best["us"]), best["kernel"]]
        for codec, kernel in SIDES:
            row, mark = run.of("decode", shape, codec)[kernel], "**" if kernel == "cuda" else ""
            line += [us(row["us"]), f"{row['of_bound']:.0%}", f"{mark}{best['us'] / row['us']:.2f}{mark}"]
        rows.append(line)
        line = [shape]
        for codec in ("int2", "vq"):
            own = run.of("decode", shape, codec)["cuda"]["us"]
            time = run.map_us(shape, codec)
            line += [us(time), f"{best['us'] / (own + time):.2f}"]
        mapped.append(line)
    table(head, rows)
    table(["batch x context", "map, INT2", "with it, INT2", "map, VQ", "with it, VQ"], mapped)


def chunks(run, op, title):
    """Print one line a shape: the best BF16, torch's flash attention where it is another, and every kernel of ours."""
    rows = []
    for shape in run.shapes(op):
        best, flash = run.best(op, shape), run.of(op, shape, "bf16").get(FLASH)
        line = [shape, f"{us(best['us'])} ({best['kernel']})", us(flash["us"]) if flash else ""]
        for codec, kernel in SIDES:
            row = run.of(op, shape, codec).get(kernel)
            share = "" if row is None else f"{us(row['us'])} ({row['us'] / best['us']:.1%})"
            if op == "extend" and row is not None:
                by_flash = f"{row['us'] / flash['us']:.2f}" if flash else "-"
                share = f"{us(row['us'])} ({by_flash} / {row['us'] / best['us']:.2f})"
            line.append(share)
        rows.append(line)
    keep = [0, 1, 2, *(3 + i for i in range(4) if any(row[3 + i] for row in rows))]
    table([([title, "best BF16", "torch flash", *NAMES])[i] for i in keep], [[row[i] for i in keep] for row in rows])


def spreads(run, wanted):
    """Print lowest and highest of the replays."""
    rows = []
    for name, op, shape, codec, kernel in wanted:
        row = run.best(op, shape) if kernel is None else run.of(op, shape, codec).get(kernel)
        if row is None:
            # Torch may have no such kernel for the shape.
            continue
        label = f"{name} ({row['kernel']})" if kernel is None else name
        rows.append([label, us(row["us"]), f"{us(row['low'])} .. {us(row['high'])}"])
    table(["figure", "median", "low .. high"], rows)


WANTED = (
    ("BF16, 32x32k", "decode", "32x32k", "bf16", None),
    ("INT2 CUDA, 32x32k", "decode", "32x32k", "int2", "cuda"),
    ("INT2 Triton, 32x32k", "decode", "32x32k", "int2", "triton"),
    ("VQ CUDA, 32x32k", "decode", "32x32k", "vq", "cuda"),
    ("BF16, 8x32k", "decode", "8x32k", "bf16", None),
    ("INT2 CUDA, 8x32k", "decode", "8x32k", "int2", "cuda"),
    ("BF16, 32x32k@64", "decode", "32x32k@64", "bf16", None),
    ("INT2 CUDA, 32x32k@64", "decode", "32x32k@64", "int2", "cuda"),
    ("BF16, causal attention of 8192 tokens", "prefill", "1x8k", "bf16", None),
    ("the same, SDPA cuDNN", "prefill", "1x8k", "bf16", "SDPA cuDNN"),
    ("INT2 CUDA, 8192 tokens written", "prefill", "1x8k", "int2", "cuda"),
    ("VQ CUDA, 8192 tokens written", "prefill", "1x8k", "vq", "cuda"),
    ("BF16, 4096 tokens on 28672", "extend", "1x4k+28k", "bf16", None),
    ("the same, torch flash", "extend", "1x4k+28k", "bf16", FLASH),
    ("INT2 Triton, 4096 tokens on 28672", "extend", "1x4k+28k", "int2", "triton"),
    ("VQ Triton, 4096 tokens on 28672", "extend", "1x4k+28k", "vq", "triton"),
)


def main():
    """Print the tables."""
    run = Run(Path(sys.argv[1]))
    decode(run)
    chunks(run, "append", "decode step written, a layer; BF16: attention of that step")
    chunks(run, "prefill", "chunk written, windows included; BF16: causal attention of the chunk")
    chunks(run, "extend", "attention of new tokens on a prefix (times flash / times the best)")
    spreads(run, WANTED)


if __name__ == "__main__":
    main()
