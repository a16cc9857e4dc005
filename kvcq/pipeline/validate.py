"""validate: measure artifacts side by side on held-out text, and write the report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvcq.artifacts.report_file import canary_entry, write_report
from kvcq.capture.selfcheck import self_check
from kvcq.data.documents import check_sources
from kvcq.errors import InputError
from kvcq.evaluation.attention import check_context
from kvcq.evaluation.canary import CanaryRecord
from kvcq.evaluation.gates import REFERENCE, apply_gates, check_gates, load_gates
from kvcq.evaluation.pool import LayerSample, pool_context, pool_layer
from kvcq.evaluation.warnings import centring_warnings, collapse_warnings, context_warnings
from kvcq.pipeline.measure import Samples, check_canary, decide_folds, measure_passage, record_canary
from kvcq.pipeline.output import exclusive
from kvcq.pipeline.progress import SILENT, Reporter
from kvcq.pipeline.requests import ValidateRequest
from kvcq.pipeline.sources import open_corpus, open_model
from kvcq.pipeline.subjects import Subject, open_subjects
from kvcq.pipeline.versions import versions
from kvcq.reports.html import render_html
from kvcq.runtime.codecs import SERVED_CAST
from kvcq.runtime.compat import check_frame, check_model
from kvcq.runtime.layout import bits_per_element, constants_bytes, kv_bytes_per_token
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.plan import LayerPlan, Windows, plan_digest
from kvcq.spec.report import ArtifactReport, CanarySummary, FoldDecision, Report

if TYPE_CHECKING:
    from kvcq.data.sequences import Corpus
    from kvcq.models.load import LoadedModel

STORAGE_CONTEXTS = (8192, 32768, 131072)
CHECK_TOKENS = 48


@dataclass(frozen=True)
class ValidateResult:
    """The report and where it was written; `path` is None after a dry run."""

    path: Path | None
    report: Report

    @property
    def failed_gates(self) -> tuple[str, ...]:
        """Gates that failed, each in words."""
        return tuple(
            f"{gate.artifact}: {gate.metric} {gate.value:.4g} at {gate.context}"
            for gate in self.report.gates
            if not gate.passed
        )

    def payload(self) -> dict[str, Any]:
        """Return the whole report for machines."""
        return {"path": str(self.path) if self.path else None, "report": self.report.plain()}


@exclusive
def validate(request: ValidateRequest, reporter: Reporter = SILENT) -> ValidateResult:
    """Measure attention fidelity by context, record canary and fold decisions, apply gates, write the report.

    Raises:
        InputError: contexts shorter than the windows, too little text, bad gates.
        MismatchError: an artifact of another model, or in another frame.
        EvaluationError: a measurement is not finite.
    """
    started = time.monotonic()
    check_sources(request.data)
    gates = load_gates(request.gates) if request.gates else ()
    subjects = open_subjects(request.artifacts)
    contexts = tuple(sorted(set(request.contexts)))
    for subject in subjects:
        check_context(contexts[0], subject.windows)
    check_gates(gates, [subject.name for subject in subjects], {"attention": contexts})
    loaded = open_model(request, reporter, longest=contexts[-1])
    origins: dict[str, tuple[str, ...]] = {}
    for subject in subjects:
        origins[subject.name] = check_model(subject, loaded, strict=request.strict)
        if wants_canary(request, subject):
            check_canary(loaded, subject)
    longest = contexts[-1]
    corpus = open_corpus(request, loaded, reporter, seq_len=longest, num_tokens=longest * request.passages)
    passages = [sequence for sequence in corpus.sequences if len(sequence.tokens) == longest]
    if len(passages) < request.passages:
        raise InputError(
            f"the text yields {len(passages)} of {request.passages} passages of {longest} tokens",
            where="--data",
            fix="give more text, fewer --passages or shorter --contexts",
        )
    reporter.stage("self-check of the capture")
    general = list(corpus.warnings)

    def warn(line: str) -> None:
        general.append(line)
        reporter.warn(line)

    geometry = self_check(loaded, torch.from_numpy(passages[0].tokens[:CHECK_TOKENS].astype("int64")), warn=warn)
    for subject in subjects:
        check_frame(subject, geometry)
    if request.dry_run:
        return ValidateResult(None, _report(request, loaded, corpus, (), [], general))

    codecs = [subject.codecs(loaded.device) for subject in subjects]
    reference: tuple[dict[int, Any], Windows] = ({}, subjects[0].windows)
    measured = [reference, *((own, subject.windows) for own, subject in zip(codecs, subjects, strict=True))]
    samples: Samples = [[] for _ in measured]
    layers = len(geometry.quantizable())
    reporter.stage("measuring attention")
    for number, passage in enumerate(passages):

        def progress(done: int, before: int = number * layers) -> None:
            reporter.advance(before + done, layers * len(passages), "layers")

        found = measure_passage(loaded, geometry, passage, contexts, measured, request.queries, progress)
        for kept, new in zip(samples, found, strict=True):
            kept.extend(new)

    folds = fold_stage(loaded, geometry, corpus, reporter)
    canaries: dict[str, CanaryRecord] = {}
    if request.canary != ():
        reporter.stage("recording the canary")
        exact_logits: dict[bytes, torch.Tensor] = {}
        wanted = [pair for pair in zip(subjects, codecs, strict=True) if wants_canary(request, pair[0])]
        for number, (subject, own) in enumerate(wanted, start=1):
            canaries[subject.name] = record_canary(loaded, subject, own, exact_logits)
            reporter.advance(number, len(wanted), "artifacts")

    rows = [bf16_row(geometry, subjects[0].windows, contexts, samples[0])]
    for number, (subject, own_samples) in enumerate(zip(subjects, samples[1:], strict=True)):
        canary = canaries.get(subject.name)
        rows.append(subject_row(subject, contexts, own_samples, folds, canary, number, origins[subject.name]))
        for line in rows[-1].warnings:
            reporter.warn(f"{subject.name}: {line}")
    report = _report(request, loaded, corpus, apply_gates(gates, rows[1:]), rows, general)
    arrays = {
        f"canary-{number}.safetensors": canaries[s.name].arrays
        for number, s in enumerate(subjects)
        if s.name in canaries
    }
    info: dict[str, Any] = {"seconds": round(time.monotonic() - started, 1), "device": str(loaded.device)}
    report = write_report(request.out, report, render_html(report), arrays, info, force=request.force)
    return ValidateResult(request.out, report)


def wants_canary(request: ValidateRequest, subject: Subject) -> bool:
    """Return True when a canary is recorded for an artifact: asked for, and it quantizes something."""
    return bool(subject.quantized) and (request.canary is None or subject.name in request.canary)


def fold_stage(
    loaded: LoadedModel, geometry: ModelGeometry, corpus: Corpus, reporter: Reporter
) -> tuple[FoldDecision, ...]:
    """Decide folds for every full layer: a property of the model, shared by all artifacts."""
    reporter.stage("testing which value rotations fold into W_O")
    tokens = torch.from_numpy(corpus.sequences[0].tokens[:CHECK_TOKENS].astype("int64"))
    return decide_folds(loaded, [layer.layer for layer in geometry.quantizable()], tokens)


def bf16_row(
    geometry: ModelGeometry, windows: Windows, contexts: Sequence[int], samples: list[LayerSample]
) -> ArtifactReport:
    """Report the BF16 cache: the rounding that every engine already has."""
    plan = tuple(LayerPlan(layer=layer.layer, reason="reference") for layer in geometry.layers)
    storage = tuple(bits_per_element(plan, geometry, windows, context) for context in storage_contexts(contexts))
    return ArtifactReport(
        name=REFERENCE,
        method="bf16",
        tensors_digest=None,
        windows=windows,
        target_context=None,
        bits={str(entry.context): entry.total for entry in storage},
        storage=storage,
        bytes_per_token=kv_bytes_per_token(plan, geometry),
        constants_bytes=0,
        quantized_layers=(),
        skipped_layers={},
        contexts=tuple(pool_context([s for s in samples if s.context == c]) for c in contexts),
        layers=layer_rows(samples, contexts[-1]),
    )


def subject_row(
    subject: Subject,
    contexts: Sequence[int],
    samples: list[LayerSample],
    folds: tuple[FoldDecision, ...],
    canary: CanaryRecord | None,
    number: int,
    origin: tuple[str, ...],
) -> ArtifactReport:
    """Report one artifact; `origin` says how the measured model differs from the one it was fitted on."""
    plan, geometry = subject.plan, subject.geometry
    storage = tuple(bits_per_element(plan, geometry, subject.windows, c) for c in storage_contexts(contexts))
    layers = layer_rows(samples, contexts[-1])
    summary = None
    if canary is not None:
        entry = canary_entry(f"canary-{number}.safetensors", canary.arrays)
        summary = CanarySummary(file=entry, tokens=canary.tokens, deviation=canary.deviation)
    warnings = [*origin]
    warnings += centring_warnings(plan, {row.layer: row.mean_ratio for row in layers})
    warnings += collapse_warnings(plan, layers)
    warnings += context_warnings(contexts, subject.target_context)
    return ArtifactReport(
        name=subject.name,
        method=subject.method,
        tensors_digest=subject.tensors_digest,
        plan_digest=plan_digest(plan),
        windows=subject.windows,
        target_context=subject.target_context,
        bits={str(entry.context): entry.total for entry in storage},
        storage=storage,
        bytes_per_token=kv_bytes_per_token(plan, geometry),
        constants_bytes=constants_bytes(subject.index),
        quantized_layers=subject.quantized,
        skipped_layers={str(entry.layer): entry.reason for entry in plan if entry.reason is not None},
        contexts=tuple(pool_context([s for s in samples if s.context == c]) for c in contexts),
        layers=layers,
        folds=tuple(fold for fold in folds if fold.layer in subject.quantized),
        canary=summary,
        warnings=tuple(warnings),
    )


def layer_rows(samples: list[LayerSample], context: int) -> tuple[Any, ...]:
    """Pool the samples of each layer at one context, in order of layer id."""
    chosen = [sample for sample in samples if sample.context == context]
    numbers = sorted({sample.layer for sample in chosen})
    return tuple(pool_layer([sample for sample in chosen if sample.layer == number]) for number in numbers)


def storage_contexts(contexts: Sequence[int]) -> tuple[int, ...]:
    """Return the contexts at which storage is stated: the measured ones and the usual long ones."""
    return tuple(sorted({*contexts, *STORAGE_CONTEXTS}))


def _report(
    request: ValidateRequest,
    loaded: LoadedModel,
    corpus: Corpus,
    gates: tuple[Any, ...],
    rows: list[ArtifactReport],
    warnings: list[str],
) -> Report:
    return Report(
        identity=loaded.identity,
        provenance=loaded.provenance,
        data=corpus.source,
        semantics="by-query",
        queries_per_context=request.queries,
        cast=str(SERVED_CAST).removeprefix("torch."),
        artifacts=tuple(rows),
        gates=gates,
        warnings=tuple(warnings),
        versions=versions(),
        command=_command(request, loaded, corpus, rows),
    )


def _command(request: ValidateRequest, loaded: LoadedModel, corpus: Corpus, rows: list[ArtifactReport]) -> str:
    """Return the command that repeats the measurement, without machine paths."""
    words = ["kvcq validate", *(row.name for row in rows[1:]), f"--model {loaded.provenance.source}"]
    words += [f"--data {label}" for label in corpus.source.sources]
    words += [f"--contexts {','.join(map(str, sorted(set(request.contexts))))}", f"--passages {request.passages}"]
    words += [f"--queries {request.queries}", f"--dtype {loaded.dtype_name}"]
    optional = {
        "--revision": request.revision,
        "--text-column": request.text_column,
        "--chat-template": request.chat_template and request.chat_template.name,
        "--gates": request.gates and request.gates.name,
        "--template": None if request.template == "auto" else request.template,
    }
    words += [f"{flag} {value}" for flag, value in optional.items() if value]
    return " ".join(words)
