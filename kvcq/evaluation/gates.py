"""Gates: limits on measured numbers that decide the exit code of validate.

A gates file is YAML; a good start for a 2-bit cache is::

    gates:
      - {metric: kl, context: max, max: 0.1}               # nats, mean over layers, heads and queries
      - {metric: top1, context: max, min: 0.8}
      - {metric: output_error, context: max, max: 0.1}
      - {metric: bits, context: 4096, max: 3.5}            # everything stored, windows included
      - {metric: kl, context: 4096, max: 0.05, artifacts: [nova]}
      - {metric: perplexity_ratio, context: max, max: 1.03}  # over the BF16 reference; needs --tasks perplexity
      - {metric: needle, context: max, min: 0.9}             # share of needles found; needs --tasks needle

`context` is a measured context length, or ``max`` for the longest of the metric's own task. Without `artifacts` a gate
applies to every artifact except the BF16 reference.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import ValidationError, field_validator, model_validator

from kvcq.errors import SHOWN, InputError, shown
from kvcq.spec.base import SpecModel
from kvcq.spec.plain_yaml import read_yaml
from kvcq.spec.report import ArtifactReport, AttentionMetrics, GateResult
from kvcq.spec.tasks import TaskScores

REFERENCE = "bf16 reference"


def _rows(entries: Iterable[Any], field: str) -> dict[int, float]:
    return {entry.context: getattr(entry, field) for entry in entries}


# Of each metric of a model-level task: the task, and its values by context.
TASK_METRICS: dict[str, tuple[str, Callable[[TaskScores], dict[int, float]]]] = {
    "perplexity": ("perplexity", lambda scores: _rows(scores.perplexity, "perplexity")),
    "perplexity_ratio": ("perplexity", lambda scores: _rows(scores.perplexity, "ratio")),
    "needle": ("needle", lambda scores: _rows(scores.needle.lengths if scores.needle else (), "score")),
    "needle_exact": ("needle", lambda scores: _rows(scores.needle.lengths if scores.needle else (), "exact")),
    "agreement": ("agreement", lambda scores: _rows(scores.agreement, "agreement")),
    "decode_kl": ("decode-kl", lambda scores: _rows(scores.decode_kl, "kl")),
    "decode_top1": ("decode-kl", lambda scores: _rows(scores.decode_kl, "top1")),
}
METRICS = (*AttentionMetrics.model_fields, "quantized_share", "bits", *TASK_METRICS)


class Gate(SpecModel):
    """One limit: exactly one of `max` and `min`."""

    metric: str
    context: int | Literal["max"] = "max"
    max: float | None = None
    min: float | None = None
    artifacts: tuple[str, ...] | None = None

    @field_validator("max", "min", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("must be a number")
        return value

    @field_validator("context", mode="before")
    @classmethod
    def _length(cls, value: Any) -> Any:
        if value != "max" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"must be a length in tokens or max, not {shown(value)}")
        return value

    @property
    def limit(self) -> tuple[Literal["max", "min"], float]:
        """Which side the limit is on, and the limit."""
        return ("max", self.max) if self.max is not None else ("min", cast(float, self.min))

    @model_validator(mode="after")
    def _one_known_limit(self) -> Gate:
        if self.metric not in METRICS:
            near = difflib.get_close_matches(self.metric[:SHOWN], METRICS, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"unknown metric {shown(self.metric)}; {hint}known: {', '.join(METRICS)}")
        if (self.max is None) == (self.min is None):
            raise ValueError("needs exactly one of max and min")
        if self.artifacts is not None and not self.artifacts:
            raise ValueError("an empty list of artifacts gates nothing")
        return self


def load_gates(path: Path) -> tuple[Gate, ...]:
    """Read a gates file.

    Raises:
        InputError: unreadable, not YAML, or anything in it that is not understood; names the gate and field.
    """
    try:
        document = read_yaml(path)
    except OSError as error:
        raise InputError(f"cannot read gates: {error.strerror}", where=path, fix="name a file for --gates") from None
    except ValueError as error:
        raise InputError(f"gates are not YAML: {error}", where=path) from None
    entries = document.get("gates") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries or len(document) != 1:
        raise InputError("not a gates file", where=path, fix="write one key `gates` with a non-empty list")
    return tuple(_gate(entry, f"{path}, gate {number}") for number, entry in enumerate(entries, 1))


def check_gates(gates: Sequence[Gate], names: Sequence[str], tasks: Mapping[str, Sequence[int]]) -> None:
    """Refuse gates that could not be judged after the measurement, before it.

    Args:
        gates: The gates.
        names: Artifacts that will be measured.
        tasks: Contexts at which each task will measure.

    Raises:
        InputError: a gate names another artifact, or a metric of a task that does not run, or not at its context.
    """
    for gate in gates:
        missing = sorted(set(gate.artifacts or ()) - {*names, REFERENCE})
        if missing:
            raise InputError(
                f"the gate on {gate.metric} names {', '.join(missing)}",
                where="--gates",
                fix=f"artifacts of this run: {', '.join(names)}",
            )
        if gate.metric == "bits":
            continue
        task = TASK_METRICS[gate.metric][0] if gate.metric in TASK_METRICS else "attention"
        if task not in tasks:
            raise InputError(
                f"the gate on {gate.metric} needs the task {task}",
                where="--gates",
                fix=f"measure it too: --tasks {','.join([*tasks, task])}",
            )
        if gate.context != "max" and gate.context not in tasks[task]:
            raise InputError(
                f"the gate on {gate.metric} needs context {gate.context}",
                where="--gates",
                fix=f"measured: {', '.join(map(str, sorted(tasks[task])))}",
            )


def apply_gates(gates: Sequence[Gate], artifacts: Sequence[ArtifactReport]) -> tuple[GateResult, ...]:
    """Apply every gate to every artifact that it concerns, in order.

    Raises:
        InputError: a gate names an artifact or context that was not measured.
    """
    names = [artifact.name for artifact in artifacts]
    results = []
    for gate in gates:
        missing = sorted(set(gate.artifacts or ()) - set(names))
        if missing:
            raise InputError(
                f"the gate on {gate.metric} names {', '.join(missing)}",
                where="--gates",
                fix=f"artifacts of this run: {', '.join(names)}",
            )
        for artifact in artifacts:
            chosen = artifact.tensors_digest is not None if gate.artifacts is None else artifact.name in gate.artifacts
            if chosen:
                results.append(_apply(gate, artifact))
    return tuple(results)


def _gate(entry: object, where: str) -> Gate:
    try:
        return Gate.model_validate(entry)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])[:SHOWN]
        raise InputError(
            f"{field + ': ' if field else ''}{first['msg'].removeprefix('Value error, ')}", where=where
        ) from None


def _apply(gate: Gate, artifact: ArtifactReport) -> GateResult:
    measured = _measured(gate.metric, artifact)
    # Bits are also known at contexts that nothing was measured at: `max` is the longest measured one.
    known = _contexts(artifact) if gate.metric == "bits" else measured
    context = max(known, default=0) if gate.context == "max" else gate.context
    if context not in measured:
        raise InputError(
            f"the gate on {gate.metric} needs context {gate.context}, which {artifact.name} was not measured at",
            where="--gates",
            fix=f"measured: {', '.join(map(str, sorted(measured))) or 'none'}",
        )
    direction, limit = gate.limit
    value = measured[context]
    return GateResult(
        artifact=artifact.name,
        metric=gate.metric,
        context=context,
        limit=limit,
        direction=direction,
        value=value,
        passed=value <= limit if direction == "max" else value >= limit,
    )


def _measured(metric: str, artifact: ArtifactReport) -> dict[int, float]:
    """Return the values of a metric by context."""
    if metric == "bits":
        return {int(context): bits for context, bits in artifact.bits.items()}
    if metric == "quantized_share":
        return {report.context: report.quantized_share for report in artifact.contexts}
    if metric in TASK_METRICS:
        return {} if artifact.tasks is None else TASK_METRICS[metric][1](artifact.tasks)
    return {report.context: getattr(report.metrics, metric) for report in artifact.contexts}


def _contexts(artifact: ArtifactReport) -> set[int]:
    """Return every context at which something was measured."""
    found = {report.context for report in artifact.contexts}
    if artifact.tasks is not None:
        found.update(*(read(artifact.tasks) for _, read in TASK_METRICS.values()))
    return found
