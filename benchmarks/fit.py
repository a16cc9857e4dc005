"""Seconds of a fit at full settings, by method, on collected statistics.

Usage: python benchmarks/fit.py STATS [--methods nova oscar ...] [--set key=value]

Collect first, for example: kvcq collect smollm2-135m --data builtin:pydoc-topics --seq-len 2k --out stats/
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from kvcq import FitRequest, fit
from kvcq.pipeline.progress import SILENT


def main() -> None:
    """Print one line a method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stats", type=Path)
    parser.add_argument(
        "--methods", nargs="+", default=["naive-int2", "quarot-int2", "oscar", "oscar-centered", "nova"]
    )
    parser.add_argument("--set", nargs="*", default=[], dest="settings")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    with tempfile.TemporaryDirectory() as folder:
        for method in args.methods:
            start = time.perf_counter()
            settings = tuple(args.settings)
            result = fit(
                FitRequest(stats=args.stats, out=Path(folder) / method, method=method, settings=settings), SILENT
            )
            layers = 0 if result.header is None else sum(entry.quantized for entry in result.header.plan)
            print(f"{method:16s} {time.perf_counter() - start:7.1f} s  {layers} layers", flush=True)


if __name__ == "__main__":
    main()
