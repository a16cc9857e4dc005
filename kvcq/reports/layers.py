"""Tables of single layers and heads: which of them lose, and what is known of each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from kvcq.reports.summary import candidates, contexts, skipped, worst_heads
from kvcq.reports.tables import Cell, Column, Group, Table
from kvcq.reports.text import ABSENT, clean, context_label, number, percent
from kvcq.spec.report import ArtifactReport, FoldDecision, LayerReport, Report

LARGE_MEAN = 4.0

COLUMNS = (
    Column("Layer", "Layer id of the model", numeric=False),
    Column("KL", "Mean KL of the attention weights over the layer's heads and queries, in nats"),
    Column("Top-1", "Queries whose strongest key is unchanged"),
    Column("Keys", "Relative squared error of the coded keys"),
    Column("Values", "Relative squared error of the coded values"),
    Column("Output", "Relative squared error of the attention output"),
    Column("|mean|²/var", "Squared mean over variance of the keys, the largest over KV heads; above 4 (!) centre them"),
    Column(
        "Fold", "Whether the value rotation folds into the output projection, or is undone at run time", numeric=False
    ),
)


def layer_table(artifact: ArtifactReport, order: Literal["kl", "layer"] = "kl", count: int | None = None) -> Table:
    """One row a measured layer at the longest context, the worst first or in the order of the model.

    Args:
        artifact: A quantized artifact; its BF16 layers are told as such.
        order: ``kl``: highest KL first, equal ones by layer id; ``layer``: as in the model.
        count: Rows to keep; all by default.
    """
    kept = skipped(artifact)
    folds = {fold.layer: fold for fold in artifact.folds}
    rows = sorted(artifact.layers, key=lambda row: (-row.metrics.kl, row.layer) if order == "kl" else (0.0, row.layer))
    return Table(COLUMNS, (Group("", tuple(_row(row, kept, folds) for row in rows[:count])),))


def _row(row: LayerReport, kept: dict[int, str], folds: dict[int, FoldDecision]) -> tuple[Cell, ...]:
    metrics, exact = row.metrics, row.layer in kept
    fold = folds.get(row.layer)
    folding = "BF16" if exact else ABSENT if fold is None else "folds" if fold.fold else "run time"
    ratio = Cell(number(row.mean_ratio) + (" !" if row.mean_ratio > LARGE_MEAN else ""))
    errors = (Cell(ABSENT if exact else number(value)) for value in (metrics.k_error, metrics.v_error))
    return (
        Cell(str(row.layer), "muted" if exact else ""),
        Cell(number(metrics.kl)),
        Cell(percent(metrics.top1)),
        *errors,
        Cell(number(metrics.output_error)),
        ratio,
        Cell(folding, "muted" if exact else ""),
    )


def head_table(artifact: ArtifactReport, count: int = 10) -> Table:
    """The query heads of an artifact that lose most, the worst first."""
    columns = (
        Column("Layer", numeric=False),
        Column("Query head"),
        Column("KL", "Mean KL of the head, in nats"),
        Column("× layer mean"),
    )
    means = {row.layer: row.metrics.kl for row in artifact.layers}
    rows = [
        (
            Cell(str(layer)),
            Cell(str(head)),
            Cell(number(kl)),
            Cell(f"{kl / means[layer]:.1f}" if means[layer] > 0 else ABSENT),
        )
        for layer, head, kl in worst_heads(artifact, count)
    ]
    return Table(columns, (Group("", tuple(rows)),))


def share_table(report: Report) -> Table:
    """Share of key reads that hit 2-bit rows, by context: what the windows leave to measure."""
    lengths = contexts(report)
    measured = candidates(report) if lengths else []
    columns = (
        Column("Artifacts", numeric=False),
        Column("Sink + recent", "Tokens kept exact at both ends"),
        *(Column(context_label(n), f"Share of key reads from 2-bit rows at {n} tokens") for n in lengths),
    )
    groups: dict[tuple[str, ...], list[str]] = {}
    for artifact in measured:
        found = {entry.context: percent(entry.quantized_share) for entry in artifact.contexts}
        shares = (found.get(n, ABSENT) for n in lengths)
        windows = f"{artifact.windows.sink} + {artifact.windows.recent}"
        groups.setdefault((windows, *shares), []).append(clean(artifact.name))
    total = len(candidates(report))
    rows = [
        (Cell("all" if len(names) == total > 1 else ", ".join(names)), *map(Cell, cells))
        for cells, names in groups.items()
    ]
    return Table(columns, (Group("", tuple(rows)),))


def concentration(rows: Iterable[LayerReport]) -> str:
    """Say how uneven the layers are: the share of the total KL that the three worst hold."""
    losses = sorted((row.metrics.kl for row in rows), reverse=True)
    if len(losses) < 6 or sum(losses) <= 0:
        return ""
    return f"The three worst layers hold {percent(sum(losses[:3]) / sum(losses))} of the KL."
