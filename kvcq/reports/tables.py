"""The tables of a report, built once and drawn by terminal, HTML and card alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvcq.reports.summary import (
    bits_at,
    bits_contexts,
    by_reason,
    candidates,
    contexts,
    gate_sentence,
    is_reference,
    method_beside,
    metrics_at,
    skipped,
    worst_heads,
    worst_layers,
)
from kvcq.reports.text import ABSENT, clean, context_label, number, percent, plural, size
from kvcq.spec.manifest import Manifest
from kvcq.spec.report import ArtifactReport, AttentionMetrics, BitsEntry, ContextReport, Report

Tone = Literal["", "best", "pass", "fail", "muted"]


@dataclass(frozen=True)
class Column:
    """A heading, what it means, whether its cells are numbers, and the heading on several lines for terminals."""

    label: str
    help: str = ""
    numeric: bool = True
    narrow: str = ""


@dataclass(frozen=True)
class Cell:
    """Plain text with a tone that each form shows in its own way (never by colour alone), and a fainter remark."""

    text: str
    tone: Tone = ""
    remark: str = ""


@dataclass(frozen=True)
class Group:
    """Rows under a common heading, which may be empty."""

    title: str
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Table:
    """Columns and grouped rows; the first cell of a row names it."""

    columns: tuple[Column, ...]
    groups: tuple[Group, ...] = field(default_factory=tuple)

    def __bool__(self) -> bool:
        return any(group.rows for group in self.groups)


NAME = Column("Artifact", numeric=False)


def name_cell(artifact: ArtifactReport) -> Cell:
    """Return the first cell of an artifact's row: its name, and the method where the name does not say it."""
    return Cell(clean(artifact.name), "muted" if is_reference(artifact) else "", method_beside(artifact))


def flat(columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> Table:
    """Return a table of one group without a title."""
    return Table(tuple(columns), (Group("", tuple(tuple(row) for row in rows)),))


def gates_table(report: Report) -> Table:
    """One row a gate: artifact, what is asked, what was measured, the result in words."""
    columns = (NAME, Column("Gate", numeric=False), Column("Measured"), Column("Result", numeric=False))
    rows = [
        (
            Cell(clean(gate.artifact)),
            Cell(gate_sentence(gate)),
            Cell(number(gate.value)),
            Cell("pass", "pass") if gate.passed else Cell("FAIL", "fail"),
        )
        for gate in report.gates
    ]
    return flat(columns, rows)


def bits_table(report: Report) -> Table:
    """Bits per element at every context, and what they consist of at the longest one."""
    lengths = bits_contexts(report)
    longest = context_label(lengths[-1]) if lengths else ""
    columns = [NAME, *(Column(context_label(n), f"Total bits per cached element at {n} tokens") for n in lengths)]
    split = any(artifact.storage for artifact in report.artifacts)
    if split:
        columns += [
            Column("codes", f"2-bit codes at {longest}, whole pages"),
            Column("meta", f"Scales and biases at {longest}"),
            Column("windows", f"BF16 sink rows and recent ring at {longest}"),
        ]
    rows = []
    for artifact in report.artifacts:
        row = [name_cell(artifact), *(_bits(bits_at(artifact, n)) for n in lengths)]
        if split:
            entry = storage_at(artifact, lengths[-1])
            parts = (entry.codes, entry.metadata, entry.windows) if entry else (None, None, None)
            row += [_bits(part) for part in parts]
        rows.append(row)
    return flat(columns, rows)


def storage_at(artifact: ArtifactReport, context: int) -> BitsEntry | None:
    """Return the breakdown of the bits at one context, if recorded."""
    return next((entry for entry in artifact.storage if entry.context == context), None)


def _bits(value: float | None) -> Cell:
    return Cell(ABSENT if value is None else f"{value:.2f}")


def bytes_table(report: Report) -> Table:
    """Cost of one more token over all layers, tokens that fit in a GiB, and bytes paid once."""
    columns = (
        NAME,
        Column("Bytes/token", "Cache bytes that one more token adds, all layers and heads, BF16 layers included"),
        Column("Tokens/GiB", "Tokens of cache that fit in one GiB, windows not counted"),
        Column("vs BF16", "How many times more tokens fit than with the BF16 cache"),
        Column("Constants", "Transforms, offsets and codebooks: stored once, whatever the context"),
        Column("Layers", "Quantized layers and layers kept in BF16", numeric=False),
    )
    reference = next((a.bytes_per_token for a in report.artifacts if is_reference(a)), None)
    rows = []
    for artifact in report.artifacts:
        cost, once = artifact.bytes_per_token, artifact.constants_bytes
        kept = f", {len(artifact.skipped_layers)} BF16" if artifact.skipped_layers else ""
        layers = "all BF16" if is_reference(artifact) else f"{len(artifact.quantized_layers)} coded{kept}"
        rows.append(
            (
                name_cell(artifact),
                Cell(f"{cost:,.0f}" if cost else ABSENT),
                Cell(f"{2**30 / cost:,.0f}" if cost else ABSENT),
                Cell(f"{reference / cost:.2f}×" if cost and reference else ABSENT),
                Cell(ABSENT if once is None else size(once)),
                Cell(layers),
            )
        )
    return flat(columns, rows)


@dataclass(frozen=True)
class Metric:
    """A column of the fidelity table: how to read, write and rank it."""

    column: Column
    read: Callable[[AttentionMetrics], float]
    write: Callable[[float], str] = number
    best: Callable[[list[float]], float] = min


METRICS = (
    Metric(Column("KL", "Mean KL(exact || quantized) of the attention weights, in nats"), lambda m: m.kl),
    Metric(Column("KL p95", "95th percentile of the KL over heads and queries"), lambda m: m.kl_p95),
    Metric(Column("KL hist", "KL of the softmax restricted to the quantized keys"), lambda m: m.kl_history),
    Metric(Column("Top-1", "Queries whose strongest key is unchanged"), lambda m: m.top1, percent, max),
    Metric(Column("Output", "Relative squared error of the attention output"), lambda m: m.output_error),
    Metric(Column("Keys", "Relative squared error of the coded keys"), lambda m: m.k_error),
    Metric(Column("Values", "Relative squared error of the coded values"), lambda m: m.v_error),
)


def fidelity_table(artifacts: Sequence[ArtifactReport], lengths: Sequence[int]) -> Table:
    """One group a context, one row an artifact in the given order; the best quantized value is marked."""
    columns = (NAME, Column("Bits", "Bits per cached element, everything counted"), *(m.column for m in METRICS))
    return Table(columns, tuple(_fidelity_group(artifacts, context) for context in lengths))


def _fidelity_group(artifacts: Sequence[ArtifactReport], context: int) -> Group:
    measured = [m for a in artifacts if not is_reference(a) and (m := metrics_at(a, context))]
    ranked = len(measured) > 1
    best = [metric.best([metric.read(m) for m in measured]) if ranked else None for metric in METRICS]
    rows = []
    for artifact in artifacts:
        found = metrics_at(artifact, context)
        row = [name_cell(artifact), _bits(bits_at(artifact, context))]
        for metric, top in zip(METRICS, best, strict=True):
            if found is None:
                row.append(Cell(ABSENT, "muted"))
                continue
            value = metric.read(found)
            tone: Tone = "muted" if is_reference(artifact) else "best" if value == top else ""
            row.append(Cell(metric.write(value), tone))
        rows.append(tuple(row))
    return Group(_context_title(artifacts, context), tuple(rows))


def _context_title(artifacts: Sequence[ArtifactReport], context: int) -> str:
    found: list[ContextReport] = [c for a in artifacts for c in a.contexts if c.context == context]
    title = f"Context {context_label(context)}"
    if found:
        share = max(entry.quantized_share for entry in found)
        title += f" · {plural(found[0].passages, 'passage')}, {plural(found[0].queries, 'query position')}"
        title += f", {percent(share)} of the keys coded"
    return title


def report_fidelity(report: Report) -> Table:
    """Return the fidelity table of all artifacts at all contexts."""
    return fidelity_table(report.artifacts, contexts(report))


def worst_table(report: Report, count: int = 3) -> Table:
    """The layers and query heads of each artifact that lose most, with their mean KL."""
    columns = (
        NAME,
        Column("Worst layers", "Layer and its mean KL in nats, longest context", numeric=False),
        Column("Worst heads", "Layer and query head with its mean KL in nats, longest context", numeric=False),
    )
    rows = []
    for artifact in candidates(report) if contexts(report) else ():
        layers = ", ".join(f"L{layer}\u00a0({number(kl)})" for layer, kl in worst_layers(artifact, count))
        heads = ", ".join(f"L{layer}H{head}\u00a0({number(kl)})" for layer, head, kl in worst_heads(artifact, count))
        rows.append((name_cell(artifact), Cell(layers or ABSENT), Cell(heads or ABSENT)))
    return flat(columns, rows)


def skipped_table(report: Report) -> Table:
    """Layers that stay BF16, by reason; artifacts that skip the same layers share a row."""
    return _by_reason(report, skipped)


def unfolded_table(report: Report) -> Table:
    """Layers whose value rotation is undone at run time, by reason; empty when every one folds into W_O."""
    return _by_reason(report, lambda row: {fold.layer: fold.reason for fold in row.folds if not fold.fold})


def _by_reason(report: Report, reasons: Callable[[ArtifactReport], Mapping[int, str]]) -> Table:
    columns = (Column("Layers", numeric=False), Column("Why", numeric=False), Column("Artifacts", numeric=False))
    groups: dict[tuple[str, str], list[str]] = {}
    for artifact in candidates(report):
        for reason, layers in by_reason(reasons(artifact)).items():
            groups.setdefault((layers, reason), []).append(clean(artifact.name))
    total = len(candidates(report))
    rows = [
        (Cell(layers), Cell(reason), Cell("all" if len(names) == total > 1 else ", ".join(names)))
        for (layers, reason), names in groups.items()
    ]
    return flat(columns, rows)


def fold_table(report: Report) -> Table:
    """Layers whose value rotation is not folded into W_O, by reason."""
    columns = (NAME, Column("Folded"), Column("Undone at run time", numeric=False), Column("Why", numeric=False))
    rows = []
    for artifact in candidates(report):
        kept = by_reason({fold.layer: fold.reason for fold in artifact.folds if not fold.fold})
        done = f"{sum(fold.fold for fold in artifact.folds)} of {len(artifact.folds)}"
        if artifact.folds:
            rows += [
                (name_cell(artifact), Cell(done), Cell(layers), Cell(reason))
                for reason, layers in (kept or {ABSENT: ABSENT}).items()
            ]
    return flat(columns, rows)


def artifact_table(report: Report) -> Table:
    """What identifies each artifact: method, windows, target context, canary, digest."""
    columns = (
        NAME,
        Column("Method", numeric=False),
        Column("Sink + recent", "Tokens kept exact at both ends"),
        Column("Target", "Context that the statistics were averaged for"),
        Column("Canary", "RMS of quantized against exact log-probs of the canary passages, in nats"),
        Column("Tensors digest", numeric=False),
    )
    rows = [
        (
            name_cell(artifact),
            Cell(clean(artifact.method)),
            Cell(ABSENT if is_reference(artifact) else f"{artifact.windows.sink} + {artifact.windows.recent}"),
            Cell(context_label(artifact.target_context) if artifact.target_context else ABSENT),
            Cell(number(artifact.canary.deviation) if artifact.canary else ABSENT),
            Cell(artifact.tensors_digest or ABSENT),
        )
        for artifact in report.artifacts
    ]
    return flat(columns, rows)


def manifest_bits(manifest: Manifest) -> Table:
    """Bits per element of a bundle, one row a context."""
    columns = (Column("Context"), Column("codes"), Column("meta"), Column("windows"), Column("total"))
    rows = [
        (Cell(context_label(entry.context)), *map(_bits, (entry.codes, entry.metadata, entry.windows, entry.total)))
        for entry in manifest.bits
    ]
    return flat(columns, rows)


def manifest_fidelity(manifest: Manifest) -> Table:
    """Sealed fidelity of a bundle, one row a context."""
    columns = (Column("Context"), *(metric.column for metric in METRICS))
    rows = [
        (Cell(context_label(entry.context)), *(Cell(metric.write(metric.read(entry.metrics))) for metric in METRICS))
        for entry in manifest.validation.contexts
    ]
    return flat(columns, rows)


def manifest_skipped(manifest: Manifest) -> Table:
    """BF16 layers of a bundle, by reason."""
    kept = by_reason({entry.layer: entry.reason for entry in manifest.plan if entry.reason is not None})
    rows = [(Cell(layers), Cell(reason)) for reason, layers in kept.items()]
    return flat((Column("Layers", numeric=False), Column("Why", numeric=False)), rows)
