"""inspect MODEL: what collect and fit would do with each layer, without collecting."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from kvcq.capture.selfcheck import self_check
from kvcq.data.documents import iter_documents
from kvcq.data.sequences import build_corpus
from kvcq.models.geometry import plan_geometry
from kvcq.models.load import LoadedModel
from kvcq.pipeline.eligible import bf16_reason
from kvcq.pipeline.progress import SILENT, Reporter
from kvcq.pipeline.requests import InspectRequest
from kvcq.pipeline.result import Answer, aligned
from kvcq.pipeline.sources import load_requested
from kvcq.runtime.layout import covered_share
from kvcq.spec.geometry import LayerGeometry, ModelGeometry

CONTEXT = 32768
CHECK_TOKENS = 48
TEXT = "builtin:pydoc-topics"
HEADINGS = ("layers", "kind", "heads", "d_k/d_v", "RoPE", "more", "plan")


def inspect_model(request: InspectRequest, reporter: Reporter = SILENT) -> Answer:
    """Load a model, run the self-check of the capture on a few tokens of built-in text, and describe its layers.

    Raises:
        InputError: no such model or no tokenizer.
        UnsupportedError: an architecture that collect refuses too, with the same line.
    """
    loaded = load_requested(request, reporter)
    context = request.context or min(CONTEXT, loaded.geometry.max_positions or CONTEXT)
    if any(rope.by_length for rope in loaded.geometry.ropes):
        planned = plan_geometry(loaded.model, longest=context)
        loaded = replace(loaded, geometry=planned, longest=context)
    reporter.stage("self-check of the capture")
    corpus = build_corpus(
        iter_documents([TEXT]), loaded.tokenizer, labels=[TEXT], seq_len=CHECK_TOKENS, num_tokens=CHECK_TOKENS
    )
    tokens = torch.from_numpy(corpus.sequences[0].tokens.astype("int64"))
    return describe(loaded, self_check(loaded, tokens, warn=reporter.warn), context)


def describe(loaded: LoadedModel, geometry: ModelGeometry, context: int) -> Answer:
    """Return the table of a checked geometry."""
    reasons = [bf16_reason(layer) for layer in geometry.layers]
    quantized = [layer.layer for layer, reason in zip(geometry.layers, reasons, strict=True) if reason is None]
    share = covered_share(quantized, geometry, context)
    label = loaded.provenance.source
    rows = [
        ("kind", "model"),
        ("model", f"{label} ({geometry.model_type}), {loaded.dtype_name}"),
        ("context", f"{geometry.max_positions or 'unlimited'} tokens"),
        ("layers", f"{len(quantized)} of {len(geometry.layers)} can be quantized"),
        ("covered", f"{100 * share:.1f} % of the KV bytes at {context} tokens"),
    ]
    record = {
        "kind": "model",
        "source": label,
        "revision": loaded.provenance.revision,
        "model_type": geometry.model_type,
        "dtype": loaded.dtype_name,
        "max_positions": geometry.max_positions,
        "context": context,
        "covered_share": share,
        "ropes": [rope.plain() for rope in geometry.ropes],
        "layers": [
            {**layer.plain(), "quantizable": reason is None, "reason": reason}
            for layer, reason in zip(geometry.layers, reasons, strict=True)
        ],
    }
    return Answer((*aligned(rows), "", *_columns([HEADINGS, *_table(geometry)])), record)


def _table(geometry: ModelGeometry) -> Iterator[tuple[str, ...]]:
    """Yield a row for each run of layers that differ in nothing but their number."""
    cells = ((layer.layer, _cells(layer, geometry)) for layer in geometry.layers)
    for same, run in itertools.groupby(cells, key=lambda item: item[1]):
        numbers = [number for number, _ in run]
        yield (str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}", *same)


def _cells(layer: LayerGeometry, geometry: ModelGeometry) -> tuple[str, ...]:
    reason = bf16_reason(layer)
    plan = "2-bit" if reason is None else f"BF16: {reason}"
    if layer.kind == "linear":
        return (layer.kind, "-", "-", "-", "-", plan)
    rope = geometry.rope_of(layer)
    turns = "none"
    if rope is not None:
        scale = "" if rope.attention_scaling == 1.0 else f" x{rope.attention_scaling:.3f}"
        turns = f"{rope.regime}{scale}, {rope.rotary_dims} of {layer.d_k} {rope.pairing}"
    more = [f"window {layer.window}"] if layer.window is not None else []
    more += [f"softcap {layer.softcap:g}"] if layer.softcap is not None else []
    more += ["sinks"] if layer.sinks else []
    more += [] if layer.unrotates else ["holds at collected positions only"]
    heads, dims = f"{layer.q_heads}/{layer.kv_heads}", f"{layer.d_k}/{layer.d_v}"
    return (layer.kind, heads, dims, turns, ", ".join(more) or "-", plan)


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
