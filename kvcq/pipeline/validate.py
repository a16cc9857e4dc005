"""validate: measure artifacts side by side on held-out text, and write the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvcq.artifacts.report_file import write_report
from kvcq.capture.selfcheck import self_check
from kvcq.data.documents import check_sources
from kvcq.errors import InputError
from kvcq.evaluation.canary import CanaryRecord
from kvcq.evaluation.gates import apply_gates, check_gates, load_gates
from kvcq.evaluation.statistics import few_items
from kvcq.pipeline.measure import Samples, check_canary, cuts_of, decide_folds, measure_passage, record_canary
from kvcq.pipeline.needles import make_needles
from kvcq.pipeline.output import exclusive
from kvcq.pipeline.progress import SILENT, Reporter
from kvcq.pipeline.report_rows import bf16_row, build_report, subject_row
from kvcq.pipeline.requests import ValidateRequest
from kvcq.pipeline.runners import cache_mode
from kvcq.pipeline.sources import open_corpus, open_model
from kvcq.pipeline.subjects import Subject, open_subjects
from kvcq.pipeline.task_plan import check_asked, check_positions, check_windows, settings_of, task_contexts
from kvcq.pipeline.tasks import run_tasks
from kvcq.reports.html import render_html
from kvcq.runtime.compat import check_frame, check_model
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.plan import Windows
from kvcq.spec.report import FoldDecision, Report

if TYPE_CHECKING:
    from kvcq.data.sequences import Corpus
    from kvcq.models.load import LoadedModel

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
    """Run the tasks, record canary and fold decisions, apply gates, write the report.

    Raises:
        InputError: contexts shorter than the windows, too little text, bad gates, an unknown task.
        MismatchError: an artifact of another model, or in another frame.
        EvaluationError: a measurement is not finite, or an item failed to run; nothing is written.
    """
    check_sources(request.data)
    return measure(request, open_subjects(request.artifacts), reporter)


def measure(
    request: ValidateRequest,
    subjects: Sequence[Subject],
    reporter: Reporter,
    finish: Callable[[Report], Report] = lambda report: report,
) -> ValidateResult:
    """Do what `validate` does to artifacts that are read already; `finish` may add to the report before it is sealed.

    Raises:
        KvcqError: as `validate`.
    """
    started = time.monotonic()
    gates = load_gates(request.gates) if request.gates else ()
    tasks = task_contexts(request)
    contexts = tuple(sorted(set(request.contexts)))
    check_windows(request, tasks, subjects)
    names = [subject.name for subject in subjects]
    check_gates(gates, names, tasks)
    check_asked(request, names, gates)
    loaded = open_model(request, reporter, longest=contexts[-1])
    check_positions(request, tasks, loaded.geometry.max_positions)
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
    needles = make_needles(request, loaded, tasks["needle"]) if "needle" in tasks else None
    for line in few_items(len(needles.questions), "needle questions") if needles is not None else ():
        warn(line)
    settings = settings_of(request, tasks, needles)
    if request.dry_run:
        return ValidateResult(None, build_report(request, loaded, corpus, (), [], general, settings))

    codecs = [subject.codecs(loaded.device) for subject in subjects]
    for own in codecs:
        cache_mode(own, request)
    reference: tuple[dict[int, Any], Windows] = ({}, subjects[0].windows)
    measured = [reference, *((own, subject.windows) for own, subject in zip(codecs, subjects, strict=True))]
    samples: Samples = [[] for _ in measured]
    layers = len(geometry.quantizable())
    if "attention" in tasks:
        reporter.stage("measuring attention")
    for number, passage in enumerate(passages if "attention" in tasks else ()):

        def progress(done: int, before: int = number * layers) -> None:
            reporter.advance(before + done, layers * len(passages), "layers")

        found = measure_passage(
            loaded, geometry, passage, contexts, measured, request.queries, progress, cuts_of(request)
        )
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

    pairs_of = list(zip(subjects, codecs, strict=True))
    scores, pairs = run_tasks(request, loaded, geometry, pairs_of, tasks, passages, needles, reporter)
    rows = [bf16_row(geometry, subjects[0].windows, contexts, samples[0], scores[0])]
    for number, (subject, own_samples) in enumerate(zip(subjects, samples[1:], strict=True)):
        canary = canaries.get(subject.name)
        row = subject_row(subject, contexts, own_samples, folds, canary, number, origins[subject.name])
        rows.append(row.model_copy(update={"tasks": scores[number + 1]}))
        for line in rows[-1].warnings:
            reporter.warn(f"{subject.name}: {line}")
    report = finish(build_report(request, loaded, corpus, apply_gates(gates, rows), rows, general, settings, pairs))
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
