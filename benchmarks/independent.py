"""The fidelity of a quickstart report, computed again in float64 by code that shares nothing with kvcq but the text.

Usage: python benchmarks/independent.py REPORT.json MODEL_FOLDER

REPORT.json is ``quickstart/report/report.json``; MODEL_FOLDER the converted SmolLM2-135M in kvcq's cache folder. Own
hooks, rotary embedding, INT2, k-means and softmax. Prints the mean attention KL at 2048 tokens of eight layers beside
the report's. OSCAR depends on the arbitrary signs of eigenvectors: both sides take the largest component positive.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcq.data import build_corpus, describe_sources, iter_documents

LAYERS = (0, 3, 7, 11, 15, 19, 23, 27)
D, Q_HEADS, KV_HEADS, CONTEXT = 64, 9, 3, 2048
GROUP = Q_HEADS // KV_HEADS
SINK, RECENT = 64, 256
ROWS, ITERATIONS, WORDS = 4096, 8, 256
Rows = dict[int, tuple[Tensor, Tensor]]


def tokens(folder: str, source: str, count: int) -> list[np.ndarray]:
    """Return token sequences of 2048."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    documents, labels = iter_documents((source,)), describe_sources((source,))
    corpus = build_corpus(documents, tokenizer, labels=labels, seq_len=CONTEXT, num_tokens=count)
    return [np.array(sequence.tokens, dtype=np.int64) for sequence in corpus.sequences]


def rope(x: Tensor, theta: float) -> Tensor:
    """Rotate rows [H, T, 64] by their positions, half-split."""
    angles = torch.arange(x.shape[1]).double()[:, None] * theta ** (-torch.arange(0, D, 2).double() / D)
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


@torch.no_grad()
def capture(model: torch.nn.Module, ids: np.ndarray) -> Rows:
    """Return (q [9, T, 64], k [3, T, 64]) by layer, float64, post-RoPE."""
    seen: dict[tuple[int, str], Tensor] = {}
    hooks = []
    for layer in LAYERS:
        for name in ("q", "k"):
            module = getattr(model.model.layers[layer].self_attn, f"{name}_proj")
            keep = lambda _, __, out, key=(layer, name): seen.__setitem__(key, out[0].double())  # noqa: E731
            hooks.append(module.register_forward_hook(keep))
    model.model(torch.from_numpy(ids)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    theta = model.config.rope_parameters["rope_theta"]
    heads = {"q": Q_HEADS, "k": KV_HEADS}
    turned = {key: rope(x.view(-1, heads[key[1]], D).transpose(0, 1), theta) for key, x in seen.items()}
    return {layer: (turned[layer, "q"], turned[layer, "k"]) for layer in LAYERS}


def int2(x: Tensor, clip: float | None = None) -> Tensor:
    """Min-max INT2 of the last axis, round half up, after a clip at the rank of `clip`."""
    if clip:
        limit = x.abs().sort(-1).values[..., min(int(clip * D), D - 1)][..., None]
        x = torch.minimum(torch.maximum(x, -limit), limit)
    low, high = x.min(-1, keepdim=True).values, x.max(-1, keepdim=True).values
    scale = (high - low).clamp(min=1e-8) / 3
    return ((x - low) / scale + 0.5).floor().clamp(0, 3) * scale + low


def sylvester(n: int) -> Tensor:
    """Return the Hadamard matrix over sqrt(n)."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h / n**0.5


HADAMARD = sylvester(D)
ORDER = torch.tensor([D - 1 - int(f"{c:06b}"[::-1], 2) for c in range(D)])
DEAL = torch.tensor([group + D // 4 * j for group in range(D // 4) for j in range(4)])


def oscar(moment: Tensor) -> Tensor:
    """Return U H P, each eigenvector's largest component positive."""
    _, vectors = torch.linalg.eigh(moment)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return (vectors * largest.sign() @ HADAMARD)[:, ORDER]


def kmeans(x: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Return 256 centroids of rows [n, 4], snapped to int8 with one scale."""
    words = x[draw.permutation(len(x))[:WORDS]].copy()
    for _ in range(ITERATIONS):
        distance = (x**2).sum(1)[:, None] - 2 * x @ words.T + (words**2).sum(1)
        nearest = distance.argmin(1)
        count = np.bincount(nearest, minlength=WORDS)
        words = np.stack([np.bincount(nearest, x[:, j], WORDS) for j in range(4)], 1) / np.maximum(count, 1)[:, None]
        empty = np.flatnonzero(count == 0)
        words[empty] = x[np.argsort(-distance[np.arange(len(x)), nearest], kind="stable")[: len(empty)]]
    scale = np.abs(words).max() / 127
    return np.round(words / scale) * scale


def nova(
    moment: Tensor, covariance: Tensor, mean: Tensor, rows: Tensor, k: Tensor, draw: np.random.Generator
) -> Tensor:
    """Return keys k [T, 64] of one head after NOVA's code, fitted to rows [n, 64]."""
    values, vectors = torch.linalg.eigh(moment)
    root, inverse = vectors * values.sqrt() @ vectors.T, vectors / values.sqrt() @ vectors.T
    axes = torch.linalg.eigh(root @ covariance @ root)[1].flip(1)
    forward, back = (root @ axes)[:, DEAL], (axes.T @ inverse)[DEAL]

    def unit(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
        r = ((x - mean) @ forward).numpy()
        rho = np.sqrt((r**2).mean(1, keepdims=True))
        return r / rho, rho

    training = unit(rows[np.sort(draw.permutation(len(rows))[:ROWS])])[0]
    coded, rho = unit(k)
    for start in range(0, D, 4):
        words = kmeans(training[:, start : start + 4], draw)
        part = coded[:, start : start + 4]
        coded[:, start : start + 4] = words[(part @ words.T - 0.5 * (words**2).sum(1)).argmax(1)]
    return torch.from_numpy(coded * rho) @ back + mean


def mean_kl(q: Tensor, k: Tensor, coded: Tensor) -> float:
    """Return the mean KL over heads and 64 queries in the last quarter, windows exact."""
    positions = np.round(np.linspace(CONTEXT * 3 // 4, CONTEXT - 1, 64)).astype(int)
    keys, queries = torch.arange(CONTEXT)[None], torch.from_numpy(positions)[:, None]
    visible, history = keys <= queries, (keys >= SINK) & (keys <= queries - RECENT)
    total = 0.0
    for head in range(Q_HEADS):
        exact = q[head, positions] @ k[head // GROUP].T / D**0.5
        mixed = torch.where(history, q[head, positions] @ coded[head // GROUP].T / D**0.5, exact)
        p, p_hat = (z.masked_fill(~visible, -np.inf).log_softmax(-1) for z in (exact, mixed))
        total += float((p.exp() * (p - p_hat).masked_fill(~visible, 0)).sum(-1).mean())
    return total / Q_HEADS


def measure(fitted: list[tuple[Tensor, Tensor]], passages: list[tuple[Tensor, Tensor]], layer: int) -> dict[str, float]:
    """Fit every method to the calibration rows of a layer and return its KL averaged over the passages."""
    count = sum(k.shape[1] for _, k in fitted)
    grouped = [q.reshape(KV_HEADS, -1, D) for q, _ in fitted]
    moment = sum(q.mT @ q for q in grouped) / (count * GROUP)
    rows = torch.cat([k for _, k in fitted], 1)
    mean = rows.mean(1)
    covariance = rows.mT @ rows / count - mean[:, :, None] * mean[:, None]
    rotation = torch.stack([oscar(m) for m in moment])
    results: dict[str, float] = {}
    for q, k in passages:
        centred = k - mean[:, None]
        draws = [np.random.default_rng([layer, head]) for head in range(KV_HEADS)]
        heads = [nova(moment[h], covariance[h], mean[h], rows[h], k[h], draws[h]) for h in range(KV_HEADS)]
        coded = {
            "naive-int2": int2(k),
            "quarot-int2": int2(k @ HADAMARD) @ HADAMARD.T,
            "oscar": int2(k @ rotation, 0.96) @ rotation.mT,
            "oscar-centered": int2(centred @ rotation, 0.96) @ rotation.mT + mean[:, None],
            "nova": torch.stack(heads),
        }
        for name, keys in coded.items():
            results[name] = results.get(name, 0.0) + mean_kl(q, k, keys) / len(passages)
    return results


def main(report: Path, folder: str) -> None:
    """Print both numbers of every method."""
    rows = json.loads(report.read_text())["artifacts"]
    stated = {row["name"]: {x["layer"]: x["metrics"]["kl"] for x in row["layers"]} for row in rows}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    calibration = tokens(folder, "builtin:pydoc-topics", 6 * CONTEXT)
    # The two sequences of smallest digest are kvcq's probe.
    calibration.sort(key=lambda ids: hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest())
    fitted = [capture(model, ids) for ids in calibration[2:]]
    passages = [capture(model, ids) for ids in tokens(folder, "builtin:stdlib", 2 * CONTEXT)]
    found = {layer: measure([x[layer] for x in fitted], [x[layer] for x in passages], layer) for layer in LAYERS}
    print("method           independent  kvcq     difference   (mean KL over layers", *LAYERS, ")")
    for name in found[LAYERS[0]]:
        own = sum(found[layer][name] for layer in LAYERS) / len(LAYERS)
        kvcq = sum(stated[name][layer] for layer in LAYERS) / len(LAYERS)
        print(f"{name:16s} {own:.4f}       {kvcq:.4f}   {100 * (kvcq / own - 1):+.1f} %")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
