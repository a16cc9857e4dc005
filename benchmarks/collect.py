"""Cost of collection against the plain forward on the same tokens, and peak memory against the number of tokens.

Usage: python benchmarks/collect.py [--model smollm2-135m] [--tokens 4096] [--repeats 3] [--small 8192] [--large 65536]

The ratio alternates both forwards in one process (the plain one is the model's own sdpa attention, logits of the last
token only). Peak RSS is measured in one child process per number of tokens, whole `kvcq collect` runs.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from kvcq.capture.collect import Capture
from kvcq.capture.selfcheck import self_check
from kvcq.data import build_corpus, describe_sources, iter_documents
from kvcq.models.library import forward
from kvcq.models.load import load_model
from kvcq.stats.probe import ProbePlan
from kvcq.stats.sampling import RowSelection

TEXT = ("builtin:pydoc-topics", "builtin:stdlib")


def ratio(model: str, tokens: int, repeats: int) -> dict[str, object]:
    """Time the plain forward and the capture in turn; return seconds and the ratio of medians."""
    loaded = load_model(model)
    corpus = build_corpus(
        iter_documents(TEXT),
        loaded.tokenizer,
        labels=describe_sources(TEXT),
        seq_len=tokens,
        num_tokens=tokens * repeats,
    )
    geometry = self_check(loaded, torch.from_numpy(corpus.sequences[0].tokens[:48].astype("int64")))
    plain, captured = [], []
    for sequence in corpus.sequences[:repeats]:
        ids = torch.from_numpy(sequence.tokens.astype("int64")).unsqueeze(0)
        plan = ProbePlan({}, {sequence.digest: tokens})
        selection = RowSelection(8192, 1024)
        selection.offer(sequence.digest, tokens)
        capture = Capture(loaded, geometry, selection, plan)
        start = time.perf_counter()
        forward(loaded.model, ids, last_only=True)
        middle = time.perf_counter()
        capture.run(sequence, tokens)
        plain.append(middle - start)
        captured.append(time.perf_counter() - middle)
    return {
        "tokens": tokens,
        "plain_s": [round(value, 2) for value in plain],
        "collect_s": [round(value, 2) for value in captured],
        "ratio": round(statistics.median(captured) / statistics.median(plain), 3),
    }


def peak_rss(model: str, tokens: int, seq_len: int) -> float:
    """Return the peak RSS in MiB of a whole collection in a child process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", folder, "--model", model]
        command += ["--tokens", str(tokens), "--seq-len", str(seq_len)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def child(folder: str, model: str, tokens: int, seq_len: int) -> None:
    """Collect and print the own peak RSS in MiB."""
    from kvcq import CollectRequest, collect

    collect(
        CollectRequest(
            model=model, data=TEXT, out=Path(folder) / "stats", num_tokens=tokens, seq_len=seq_len, rows=4096
        )
    )
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    """Print both measurements as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", type=int, default=8192)
    parser.add_argument("--large", type=int, default=65536)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.model, args.tokens, args.seq_len)
        return
    result: dict[str, object] = {"threads": torch.get_num_threads(), **ratio(args.model, args.tokens, args.repeats)}
    small, large = (peak_rss(args.model, tokens, args.seq_len) for tokens in (args.small, args.large))
    result |= {f"peak_mib_{args.small}": round(small), f"peak_mib_{args.large}": round(large)}
    result["peak_ratio"] = round(large / small, 3)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
