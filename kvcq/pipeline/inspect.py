"""inspect, verify, diff: looking at artifacts. None of them imports torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvcq.artifacts import diff as differences
from kvcq.artifacts import verify as checks
from kvcq.artifacts.fit_file import FitArtifact
from kvcq.artifacts.report_file import ReportArtifact
from kvcq.artifacts.scores_file import ScoresArtifact
from kvcq.artifacts.stats_file import StatsArtifact
from kvcq.errors import visible
from kvcq.pipeline.result import Answer, aligned
from kvcq.spec.header import FitHeader, StatsHeader
from kvcq.spec.manifest import Manifest
from kvcq.spec.plan import LayerPlan
from kvcq.spec.report import Report
from kvcq.spec.scores import ScoresReport

SHOWN = 60


def verify(path: Path) -> Answer:
    """Check every byte and the sense of an artifact of any kind.

    Raises:
        CorruptArtifactError: anything altered, truncated, missing, unlisted or meaningless.
        MismatchError: another format version.
        InputError: nothing there.
    """
    intact = checks.verify(path)
    rows = [("verified", f"{intact.kind}, {intact.files} files, {intact.size} bytes"), ("digest", intact.digest)]
    if intact.tensors_digest:
        rows.append(("tensors", intact.tensors_digest))
    record = {
        "ok": True,
        "kind": intact.kind,
        "digest": intact.digest,
        "tensors_digest": intact.tensors_digest,
        "files": intact.files,
        "bytes": intact.size,
        "archive": intact.archive,
    }
    return Answer(tuple(aligned(rows)), record)


def inspect(path: Path) -> Answer:
    """Describe an artifact of any kind, after the checks of `verify`."""
    artifact = checks.read_any(path)
    if isinstance(artifact, StatsArtifact):
        return _answer("stats", artifact.header, _stats(artifact.header))
    if isinstance(artifact, FitArtifact):
        return _answer("fit", artifact.header, _fit(artifact.header))
    if isinstance(artifact, ReportArtifact):
        return _answer("report", artifact.report, _report(artifact.report))
    if isinstance(artifact, ScoresArtifact):
        return _answer("scores", artifact.report, _scores(artifact.report))
    return _answer("bundle", artifact.manifest, _bundle(artifact.manifest))


def is_artifact(target: str) -> bool:
    """Tell whether `inspect` is asked about an artifact rather than about a model.

    What exists is a model if it is a .gguf file or a folder with config.json. What does not is a model if it reads like
    a hub id or a builtin name.
    """
    path = Path(target)
    if path.is_dir():
        return not (path / "config.json").is_file()
    if path.exists():
        return path.suffix.lower() != ".gguf"
    return path.suffix in (".kvcq", ".gguf") or target.startswith((".", "/", "~")) or target.count("/") > 1


def diff(a: Path, b: Path) -> Answer:
    """List what differs between two artifacts, field by field and tensor by tensor."""
    found = differences.diff(a, b)
    lines = [visible(f"{d.field}: {_short(d.left)} -> {_short(d.right)}{_error(d.error)}") for d in found]
    record = [{"field": d.field, "left": d.left, "right": d.right, "max_difference": d.error} for d in found]
    return Answer(tuple(lines or ["no difference"]), {"equal": not found, "differences": record})


def _answer(kind: str, record: Any, rows: list[tuple[str, str]]) -> Answer:
    return Answer(tuple(aligned([("kind", kind), *rows])), {"kind": kind, "header": record.plain()})


def _stats(header: StatsHeader) -> list[tuple[str, str]]:
    rows = [
        ("model", f"{header.provenance.source} ({header.geometry.model_type})"),
        ("text", f"{', '.join(header.data.sources)}; {header.data.packing} packing, template {header.data.template}"),
        ("tokens", f"{header.tokens} in {len(header.sequences)} sequences of up to {header.longest}"),
        ("probe", f"{len(header.probe)} sequences"),
        *([("shard", f"{header.shard} of {header.shard.sequences} sequences")] if header.shard else []),
        ("rows", f"{header.rows} keys and values, {header.query_rows} queries, {header.dtype}, seed {header.seed}"),
        ("layers", f"{len(header.geometry.quantizable())} of {len(header.geometry.layers)}"),
        *((f"layer {layer}", reason) for layer, reason in header.skipped.items()),
        ("digest", header.digest),
    ]
    return rows + [("warning", line) for line in header.warnings]


def _fit(header: FitHeader) -> list[tuple[str, str]]:
    rows = [*_fitted(header), *_notes(header), ("statistics", header.stats_digest), ("digest", header.digest)]
    return rows + [("warning", line) for line in header.warnings]


def _notes(header: FitHeader) -> list[tuple[str, str]]:
    """Return one row a layer with what fit measured of it, e.g. ``mean_ratio 0.31, rank 64 64 64 64``."""
    layers: dict[int, list[str]] = {}
    for key, values in sorted(header.notes.items()):
        _, layer, name = key.split(".", 2)
        layers.setdefault(int(layer), []).append(f"{name} {' '.join(f'{value:.4g}' for value in values)}")
    return [(f"layer {layer}", ", ".join(layers[layer])) for layer in sorted(layers)]


def _bundle(manifest: Manifest) -> list[tuple[str, str]]:
    rows = _fitted(manifest)
    gates = manifest.validation.gates
    if gates:
        failed = [f"{gate.metric} {gate.value:.4g} at {gate.context}" for gate in gates if not gate.passed]
        passed = f"{len(gates) - len(failed)} of {len(gates)} passed"
        rows.append(("gates", passed + (f"; failed: {', '.join(failed)}" if failed else "")))
    rows += [
        (
            f"bits at {entry.context}",
            f"{entry.total:.3f} (codes {entry.codes:.3f}, metadata {entry.metadata:.3f}, windows {entry.windows:.3f})",
        )
        for entry in manifest.bits
    ]
    rows.append(("constants", f"{manifest.constants_bytes} bytes"))
    rows += [
        (f"KL at {entry.context}", f"{entry.metrics.kl:.4g} nats, top-1 {entry.metrics.top1:.3f}")
        for entry in manifest.validation.contexts
    ]
    folded = sum(1 for fold in manifest.folds if fold.fold)
    rows.append(("value fold", f"{folded} of {len(manifest.folds)} layers may fold into W_O"))
    return [*rows, ("digest", manifest.digest)]


def _fitted(header: FitHeader | Manifest) -> list[tuple[str, str]]:
    recipe = header.recipe
    return [
        ("model", f"{header.provenance.source} ({header.geometry.model_type})"),
        ("method", recipe.method + "".join(f" {key}={value}" for key, value in recipe.params.items())),
        ("windows", f"sink {recipe.windows.sink}, recent {recipe.windows.recent}"),
        ("context", f"fitted for {header.target_context} tokens, collected to {header.collected_context}"),
        ("calibration", ", ".join(header.calibration.sources)),
        *_plan(header.plan),
        ("tensors", f"{len(header.tensors)}, {header.tensors_digest}"),
    ]


def _plan(plan: tuple[LayerPlan, ...]) -> list[tuple[str, str]]:
    quantized = [entry for entry in plan if entry.quantized]
    rows = [("layers", f"{len(quantized)} of {len(plan)} quantized")]
    return rows + [(f"layer {entry.layer}", f"BF16: {entry.reason}") for entry in plan if not entry.quantized]


def _report(report: Report) -> list[tuple[str, str]]:
    rows = [
        ("model", report.provenance.source),
        ("text", ", ".join(report.data.sources)),
        ("gates", f"{sum(gate.passed for gate in report.gates)} of {len(report.gates)} passed"),
    ]
    for artifact in report.artifacts:
        kl = ", ".join(f"{entry.metrics.kl:.4g} at {entry.context}" for entry in artifact.contexts)
        rows.append((artifact.name, f"KL {kl}"))
    return [*rows, ("digest", report.digest)]


def _scores(report: ScoresReport) -> list[tuple[str, str]]:
    sampling = report.sampling
    rows = [("asked", f"{sampling.samples} samples, temperature {sampling.temperature:g}, seed {sampling.seed}")]
    rows += [(f"task {task.task}", f"{task.items} items") for task in report.tasks]
    for server in report.servers:
        found = ", ".join(f"{row.task} {row.score:.3f} ({row.truncated} truncated)" for row in server.tasks)
        rows.append((server.name, f"{server.model}: {found}"))
    return [*rows, ("digest", report.digest)] + [("warning", line) for line in report.warnings]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _error(error: float | None) -> str:
    return "" if error is None else f" (largest difference {error:.3g})"
