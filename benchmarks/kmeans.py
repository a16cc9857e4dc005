"""Time three forms of the k-means behind NOVA's codebooks, extrapolated to a whole model.

Usage: python benchmarks/kmeans.py [--books 1440] [--rows 8192] [--iterations 25] [--sample 24] [--threads 1 2]

The default is SmolLM2-135M: 30 layers x 3 KV heads x 16 groups. Distortion is the mean squared distance to the
nearest word over the sample. Run on an idle machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kvcq.methods.kmeans import kmeans

WORDS = 256
TILE = 1024


def start(rows: Tensor, seed: int) -> Tensor:
    """Return the first words, the same in every form."""
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:WORDS]]


def packed(rows: Tensor, iterations: int) -> Tensor:
    """The package's form: the index inside the mantissa, one minimum."""
    return kmeans(rows, range(len(rows)), iterations=iterations)


def tiled(rows: Tensor, iterations: int) -> Tensor:
    """One codebook after the other, tiles of scores, torch's arg-max."""
    return torch.stack([_tiled(book, seed, iterations) for seed, book in enumerate(rows)])


def _tiled(book: Tensor, seed: int, iterations: int) -> Tensor:
    centroids = start(book, seed)
    for _ in range(iterations):
        half = centroids.square().sum(1) / 2
        index = torch.cat([torch.addmm(-half, part, centroids.T).argmax(1) for part in book.split(TILE)])
        sums = torch.zeros(WORDS, book.shape[1], dtype=torch.float64).index_add_(0, index, book.double())
        counts = torch.bincount(index, minlength=WORDS)
        centroids = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], centroids).float()
    return centroids


def batched(rows: Tensor, iterations: int) -> Tensor:
    """All codebooks of a head in one batched product, torch's arg-max, one-hot averages."""
    return torch.cat([_batched(part, first * 16, iterations) for first, part in enumerate(rows.split(16))])


def _batched(rows: Tensor, seed: int, iterations: int) -> Tensor:
    centroids = torch.stack([start(book, seed + index) for index, book in enumerate(rows)])
    for _ in range(iterations):
        half = centroids.square().sum(2) / 2
        index = torch.baddbmm(-half.unsqueeze(1), rows, centroids.mT).argmax(2)
        hot = torch.zeros(*index.shape, WORDS).scatter_(2, index.unsqueeze(2), 1.0)
        counts = hot.sum(1).unsqueeze(2)
        centroids = torch.where(counts > 0, torch.bmm(hot.mT, rows) / counts.clamp(min=1), centroids)
    return centroids


FORMS: dict[str, Callable[[Tensor, int], Tensor]] = {"packed": packed, "tiled": tiled, "batched": batched}


def main() -> None:
    """Print one line for each form and thread count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--books", type=int, default=1440)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--sample", type=int, default=24, help="codebooks really computed")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    rows = torch.randn(options.sample, options.rows, 4, generator=torch.Generator().manual_seed(0))
    print(f"{options.books} codebooks, {options.rows} rows, {options.iterations} steps, from {options.sample}")
    print(f"{'form':<8} {'threads':>7} {'wall s':>8} {'CPU s':>8} {'distortion':>11}")
    scale = options.books / options.sample
    for name, form in FORMS.items():
        for threads in options.threads:
            torch.set_num_threads(threads)
            form(rows[:1], 1)
            wall, cpu = time.perf_counter(), time.process_time()
            words = form(rows, options.iterations)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            error = torch.cdist(rows, words).amin(2).square().mean()
            print(f"{name:<8} {threads:>7} {wall * scale:>8.1f} {cpu * scale:>8.1f} {error:>11.6f}", flush=True)


if __name__ == "__main__":
    main()
