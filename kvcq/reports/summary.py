"""What a report comes to: the verdict, and the selections that every form of it shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvcq.reports.task_summary import closeness, task_clauses, task_contexts
from kvcq.reports.text import clean, context_label, number, percent, plural, ranges
from kvcq.spec.report import ArtifactReport, AttentionMetrics, GateResult, Report

BF16_BITS = 16.0


@dataclass(frozen=True)
class Verdict:
    """One word, one sentence about the gates, one about the artifact closest to BF16."""

    status: Literal["pass", "fail", "measured"]
    headline: str
    detail: str


def is_reference(artifact: ArtifactReport) -> bool:
    """Say whether this row is the exact BF16 cache that the others are compared with."""
    return artifact.tensors_digest is None


def candidates(report: Report) -> list[ArtifactReport]:
    """Return the quantized artifacts in the order of the report."""
    return [artifact for artifact in report.artifacts if not is_reference(artifact)]


def contexts(report: Report) -> list[int]:
    """Return all measured context lengths, ascending."""
    return sorted({entry.context for artifact in report.artifacts for entry in artifact.contexts})


def metrics_at(artifact: ArtifactReport, context: int) -> AttentionMetrics | None:
    """Return the metrics of one artifact at one context, if it was measured there."""
    return next((entry.metrics for entry in artifact.contexts if entry.context == context), None)


def bits_at(artifact: ArtifactReport, context: int) -> float | None:
    """Return the total bits per element at one context, if recorded; the reference has 16."""
    stored = next((entry.total for entry in artifact.storage if entry.context == context), None)
    if stored is None:
        stored = artifact.bits.get(str(context))
    return BF16_BITS if stored is None and is_reference(artifact) else stored


def bits_contexts(report: Report) -> list[int]:
    """Return all contexts for which bits are recorded, ascending."""
    keys = {int(key) for artifact in report.artifacts for key in artifact.bits if key.isdecimal()}
    return sorted(keys | {entry.context for artifact in report.artifacts for entry in artifact.storage})


def longest_stored(report: Report) -> int:
    """Return the context whose bits stand beside the scores: the longest measured, else the longest known."""
    known = bits_contexts(report)
    tasks = {context for artifact in report.artifacts for context in task_contexts(artifact.tasks)}
    return max(contexts(report), default=max(tasks & set(known), default=max(known, default=0)))


def method_beside(artifact: ArtifactReport) -> str:
    """Return the method where the artifact's name does not say it: it is the name, or heads a point of a sweep."""
    name, method = (text.lower().replace("_", "-") for text in (artifact.name, artifact.method))
    said = is_reference(artifact) or name == method or name.startswith(f"{method}[")
    return "" if said else clean(artifact.method)


def closest(report: Report) -> ArtifactReport | None:
    """Return the artifact of lowest attention KL at the longest context; the first of equals.

    Where attention was not measured, the tasks decide, as `task_summary.closeness` says.
    """
    longest = max(contexts(report), default=0)
    found = candidates(report)
    scored = [(metrics.kl, artifact) for artifact in found if (metrics := metrics_at(artifact, longest))]
    scored = scored or [(far, artifact) for artifact in found if (far := closeness(artifact)) is not None]
    return min(scored, key=lambda pair: pair[0], default=(0.0, None))[1]


def verdict(report: Report) -> Verdict:
    """Judge a report by its gates; without gates it only states what was measured."""
    failed = [gate for gate in report.gates if not gate.passed]
    if failed:
        names = ", ".join(dict.fromkeys(clean(gate.artifact) for gate in failed))
        headline = f"{len(failed)} of {plural(len(report.gates), 'gate')} failed: {names}"
        return Verdict("fail", headline, _closest_sentence(report))
    if report.gates:
        count = len(report.gates)
        return Verdict("pass", "The gate holds" if count == 1 else f"All {count} gates hold", _closest_sentence(report))
    return Verdict("measured", "Measured, no gates were set", _closest_sentence(report))


def _closest_sentence(report: Report) -> str:
    best, longest = closest(report), max(contexts(report), default=0)
    if best is None:
        return "Only the BF16 reference was measured."
    lead = "is closest to BF16" if len(candidates(report)) > 1 else "was measured"
    metrics, clauses = metrics_at(best, longest), []
    if metrics is not None:
        lead += f" at {context_label(longest)}"
        clauses += [f"attention KL {number(metrics.kl)} nats", f"top-1 {percent(metrics.top1)}"]
    clauses += task_clauses(best.tasks)
    longest = longest_stored(report)
    if bits := bits_at(best, longest):
        at = "" if metrics is not None else f" at {context_label(longest)}"
        clauses.append(f"{bits:.2f} bits per element{at} ({BF16_BITS / bits:.1f}× smaller)")
    return f"{clean(best.name)} {lead}: {', '.join(clauses)}."


def gate_sentence(gate: GateResult) -> str:
    """State what a gate asks for, e.g. ``kl ≤ 0.1 at 8k``."""
    sign = "≤" if gate.direction == "max" else "≥"
    return f"{clean(gate.metric)} {sign} {gate.limit:g} at {context_label(gate.context)}"


def reproduction(report: Report) -> str:
    """Say in a line what must be the same for the numbers to come back: text, query positions, cast, versions."""
    data = report.data
    versions = ", ".join(f"{clean(name)} {clean(version)}" for name, version in sorted(report.versions.items()))
    revision = f" at {clean(report.provenance.revision)}" if report.provenance.revision else ""
    return (
        f"Model {clean(report.provenance.source)}{revision}; {data.got_tokens:,} tokens of "
        f"{', '.join(map(clean, data.sources)) or 'unnamed text'} (SHA-256 {clean(data.sha256)[:16]}); "
        f"{report.semantics} semantics, {report.queries_per_context} queries a context, "
        f"cast {clean(report.cast)}; {versions}"
    )


def worst_layers(artifact: ArtifactReport, count: int) -> list[tuple[int, float]]:
    """Return (layer, mean KL) of the layers with the highest KL at the longest context."""
    return sorted(((row.layer, row.metrics.kl) for row in artifact.layers), key=lambda pair: -pair[1])[:count]


def worst_heads(artifact: ArtifactReport, count: int) -> list[tuple[int, int, float]]:
    """Return (layer, query head, mean KL) of the heads with the highest KL at the longest context."""
    cells = [(row.layer, head, kl) for row in artifact.layers for head, kl in enumerate(row.kl_heads)]
    return sorted(cells, key=lambda cell: -cell[2])[:count]


def by_reason(layers: Mapping[int, str]) -> dict[str, str]:
    """Group layers by what is said of them: reason to layer ranges, in order of the first layer."""
    groups: dict[str, list[int]] = {}
    for layer in sorted(layers):
        groups.setdefault(clean(layers[layer]), []).append(layer)
    return {reason: ranges(numbers) for reason, numbers in groups.items()}


def skipped(artifact: ArtifactReport) -> dict[int, str]:
    """Return the BF16 layers of an artifact with their reasons."""
    return {int(layer): reason for layer, reason in artifact.skipped_layers.items() if layer.isdecimal()}


def warnings(report: Report) -> list[tuple[str, str]]:
    """Return (whom it concerns, text) of all warnings; texts shared by several artifacts appear once."""
    concerns: dict[str, list[str]] = {clean(text): [] for text in report.warnings}
    for artifact in report.artifacts:
        for text in artifact.warnings:
            concerns.setdefault(clean(text), []).append(clean(artifact.name))
    return [(", ".join(names) or "all artifacts", text) for text, names in concerns.items()]
