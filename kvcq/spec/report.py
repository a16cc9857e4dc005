"""``report.json``: what validate measured. No timestamps, paths or timings: those go to ``run.json``."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from kvcq.spec.base import GrowingModel, NumberKey, SpecModel
from kvcq.spec.files import FileEntry, Sha256
from kvcq.spec.header import DataSource
from kvcq.spec.identity import Identity, Provenance
from kvcq.spec.plan import Windows
from kvcq.spec.sweep import Sweep
from kvcq.spec.tasks import PairTest, TaskScores, TaskSettings


class AttentionMetrics(SpecModel):
    """Attention fidelity averaged over the query heads and query positions of a set of heads.

    Relative errors are squared-norm ratios, ``sum |x - x_hat|^2 / sum |x|^2``, in un-rotated coordinates.

    Attributes:
        k_error, v_error: Relative error of keys and values that were coded.
        k_centred_error: As k_error, relative to the keys' energy around their mean.
        k_query_error: Key error weighted by the query second moment.
        qk_error: Mean squared error of the scaled logits, each query's mean shift removed.
        sv_error: Relative error of S V_hat against S V with exact softmax weights S.
        kl: Mean KL(S || S_hat) in nats, full causal softmax, learned sinks included.
        kl_geometric: Geometric mean of the KL over heads.
        kl_p95: 95th percentile of the KL over (head, query).
        kl_history: Mean KL of the softmax restricted to the quantized keys.
        top1: Share of queries whose arg-max key is unchanged, all keys.
        top1_history: The same over the quantized keys.
        output_error: Relative error of the attention output.
        output_centred_error: The same with the output's mean over queries removed from both.
    """

    k_error: float
    v_error: float
    k_centred_error: float
    k_query_error: float
    qk_error: float
    sv_error: float
    kl: float
    kl_geometric: float
    kl_p95: float
    kl_history: float
    top1: float
    top1_history: float
    output_error: float
    output_centred_error: float


class ContextReport(SpecModel):
    """All layers at one context length."""

    context: int = Field(ge=1)
    passages: int
    queries: int
    quantized_share: float
    metrics: AttentionMetrics


class LayerReport(SpecModel):
    """One layer at the longest context; `kl_heads` has one mean KL per query head.

    `mean_ratio` is |mean k|^2 / variance of the keys, the largest over the KV heads.
    """

    layer: int = Field(ge=0)
    mean_ratio: float
    metrics: AttentionMetrics
    kl_heads: tuple[float, ...]


class BitsEntry(SpecModel):
    """Bits per element of the quantized layers at one context, every stored byte counted.

    `total` = `codes` + `metadata` + `windows`; windows are the BF16 sink rows and the recent ring.
    """

    context: int = Field(ge=1)
    codes: float
    metadata: float
    windows: float
    total: float


class FoldDecision(SpecModel):
    """Whether the value rotation may be folded into W_O, decided by running the attention module both ways.

    `error` is the relative error of the folded module's output in float32; None where there is nothing to fold into.
    """

    layer: int = Field(ge=0)
    fold: bool
    error: float | None
    reason: str


class CanarySummary(SpecModel):
    """The recorded canary: file, and how far quantized log-probs are from exact ones (RMS, nats)."""

    file: FileEntry
    tokens: int
    deviation: float


class ArtifactReport(GrowingModel):
    """One artifact, or the BF16 reference (then both digests are None).

    Attributes:
        plan_digest: SHA-256 of the plan; together with `tensors_digest` it says what was measured.
        bits: Total bits per element by context, keys are contexts in tokens.
        storage: The same totals broken down.
        bytes_per_token: Marginal bytes of one more token, all layers and heads, BF16 layers included.
        constants_bytes: Transforms, offsets and codebooks: paid once, whatever the context.
        contexts, layers: Attention fidelity; empty when the attention task did not run.
        tasks: Model-level scores; None when no such task ran.
    """

    LATER: ClassVar[frozenset[str]] = frozenset({"tasks"})

    name: str
    method: str
    tensors_digest: str | None
    plan_digest: str | None = None
    windows: Windows
    target_context: int | None
    bits: dict[NumberKey, float]
    storage: tuple[BitsEntry, ...] = ()
    bytes_per_token: float | None = None
    constants_bytes: int | None = None
    quantized_layers: tuple[int, ...]
    skipped_layers: dict[NumberKey, str]
    contexts: tuple[ContextReport, ...]
    layers: tuple[LayerReport, ...]
    folds: tuple[FoldDecision, ...] = ()
    canary: CanarySummary | None = None
    tasks: TaskScores | None = None
    warnings: tuple[str, ...] = ()


class GateResult(SpecModel):
    """One gate applied to one artifact."""

    artifact: str
    metric: str
    context: int
    limit: float
    direction: Literal["max", "min"]
    value: float
    passed: bool


class Report(GrowingModel):
    """``report.json``, the record that pack seals into a bundle.

    `chunk` and `cached_at` are the prefill of ``served`` semantics: tokens a chunk, and where a prefix was found in the
    cache. `tasks` are the settings of model-level tasks, `pairs` their paired tests. `sweep` says which rows are points
    of a grid. `files` lists the canaries and ``report.html``; `digest` is the SHA-256 of the canonical report without
    that field. The writer fills in both.
    """

    LATER: ClassVar[frozenset[str]] = frozenset({"chunk", "cached_at", "tasks", "pairs", "sweep"})

    format: Literal["kvcq.report"] = "kvcq.report"
    version: Literal[1] = 1
    identity: Identity
    provenance: Provenance
    data: DataSource
    semantics: Literal["by-query", "served", "deferred"]
    chunk: int | None = Field(default=None, ge=1)
    cached_at: int | None = Field(default=None, ge=1)
    queries_per_context: int
    cast: str
    artifacts: tuple[ArtifactReport, ...]
    gates: tuple[GateResult, ...] = ()
    tasks: TaskSettings | None = None
    pairs: tuple[PairTest, ...] = ()
    sweep: Sweep | None = None
    warnings: tuple[str, ...] = ()
    versions: dict[str, str]
    command: str = Field(default="")
    files: tuple[FileEntry, ...] = ()
    digest: Sha256 = ""
