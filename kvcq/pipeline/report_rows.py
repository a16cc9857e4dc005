"""From measurements to the rows of a report, and the report around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcq.artifacts.report_file import canary_entry
from kvcq.evaluation.canary import CanaryRecord
from kvcq.evaluation.gates import REFERENCE
from kvcq.evaluation.pool import LayerSample, pool_context, pool_layer
from kvcq.evaluation.warnings import centring_warnings, collapse_warnings, context_warnings
from kvcq.pipeline.requests import ValidateRequest
from kvcq.pipeline.subjects import Subject
from kvcq.pipeline.versions import versions
from kvcq.runtime.codecs import SERVED_CAST
from kvcq.runtime.layout import bits_per_element, constants_bytes, kv_bytes_per_token
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.plan import LayerPlan, Windows, plan_digest
from kvcq.spec.report import ArtifactReport, CanarySummary, ContextReport, FoldDecision, Report
from kvcq.spec.tasks import PairTest, TaskScores, TaskSettings

if TYPE_CHECKING:
    from kvcq.data.sequences import Corpus
    from kvcq.models.load import LoadedModel

STORAGE_CONTEXTS = (8192, 32768, 131072)


def bf16_row(
    geometry: ModelGeometry,
    windows: Windows,
    contexts: Sequence[int],
    samples: list[LayerSample],
    scores: TaskScores | None,
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
        contexts=context_rows(samples),
        layers=layer_rows(samples, contexts[-1]),
        tasks=scores,
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
        contexts=context_rows(samples),
        layers=layers,
        folds=tuple(fold for fold in folds if fold.layer in subject.quantized),
        canary=summary,
        warnings=tuple(warnings),
    )


def context_rows(samples: list[LayerSample]) -> tuple[ContextReport, ...]:
    """Pool the samples of each context, ascending; none when attention was not measured."""
    measured = sorted({sample.context for sample in samples})
    return tuple(pool_context([sample for sample in samples if sample.context == context]) for context in measured)


def layer_rows(samples: list[LayerSample], context: int) -> tuple[Any, ...]:
    """Pool the samples of each layer at one context, in order of layer id."""
    chosen = [sample for sample in samples if sample.context == context]
    numbers = sorted({sample.layer for sample in chosen})
    return tuple(pool_layer([sample for sample in chosen if sample.layer == number]) for number in numbers)


def storage_contexts(contexts: Sequence[int]) -> tuple[int, ...]:
    """Return the contexts at which storage is stated: the measured ones and the usual long ones."""
    return tuple(sorted({*contexts, *STORAGE_CONTEXTS}))


def build_report(
    request: ValidateRequest,
    loaded: LoadedModel,
    corpus: Corpus,
    gates: tuple[Any, ...],
    rows: list[ArtifactReport],
    warnings: list[str],
    settings: TaskSettings | None,
    pairs: tuple[PairTest, ...] = (),
) -> Report:
    """Return the whole report, unsealed; `rows` begin with the reference."""
    served = request.semantics == "served"
    return Report(
        identity=loaded.identity,
        provenance=loaded.provenance,
        data=corpus.source,
        semantics=request.semantics,
        chunk=request.chunk if served else None,
        cached_at=request.cached_at if served else None,
        queries_per_context=request.queries,
        cast=str(SERVED_CAST).removeprefix("torch."),
        artifacts=tuple(rows),
        gates=gates,
        tasks=settings,
        pairs=pairs,
        warnings=tuple(warnings),
        versions=versions(),
        command=_command(request, loaded, corpus, rows, settings),
    )


def _command(
    request: ValidateRequest,
    loaded: LoadedModel,
    corpus: Corpus,
    rows: list[ArtifactReport],
    settings: TaskSettings | None,
) -> str:
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
    return " ".join([*words, *_task_words(request, settings)])


def _task_words(request: ValidateRequest, settings: TaskSettings | None) -> list[str]:
    """Return the flags of tasks and semantics that differ from what a bare command does."""
    if settings is None and request.semantics == "by-query":
        return []
    words = [f"--tasks {','.join(request.tasks)}", f"--semantics {request.semantics}", f"--chunk {request.chunk}"]
    words += [f"--cached-at {request.cached_at}"] if request.cached_at is not None else []
    if settings is None:
        return words
    words += [f"--cache {request.cache}", f"--seed {settings.seed}"]
    if settings.agreement is not None:
        words.append(f"--new-tokens {settings.agreement.new_tokens}")
    if settings.decode_kl is not None:
        words.append(f"--decode-steps {settings.decode_kl.steps}")
    if (needle := settings.needle) is not None:
        words += [f"--needle-tasks {','.join(needle.tasks)}", f"--needle-items {needle.items}"]
        words += [f"--needle-lengths {','.join(map(str, needle.contexts))}", f"--haystack {needle.haystack}"]
        if request.needle_artifacts is not None:
            words.append(f"--needle-artifacts {','.join(request.needle_artifacts)}")
        words.append(f"--needle-depths {','.join(f'{depth:g}' for depth in needle.depths)}")
    return words
