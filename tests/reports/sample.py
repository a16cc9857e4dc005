"""A realistic made-up report: the BF16 reference and five methods, three contexts, 30 layers of 9 query heads."""

from __future__ import annotations

import math
import random

from kvcq.spec.codec import CodecSpec
from kvcq.spec.files import FileEntry, TensorEntry
from kvcq.spec.geometry import LayerGeometry, ModelGeometry
from kvcq.spec.header import DataSource
from kvcq.spec.identity import Identity, Provenance, WeightFile
from kvcq.spec.manifest import Manifest, ValidationSummary
from kvcq.spec.plan import LayerPlan, Windows
from kvcq.spec.recipe import Recipe
from kvcq.spec.report import (
    ArtifactReport,
    AttentionMetrics,
    BitsEntry,
    CanarySummary,
    ContextReport,
    FoldDecision,
    GateResult,
    LayerReport,
    Report,
)

CONTEXTS = (2048, 4096, 8192)
LAYERS, HEADS = 30, 9
METHODS = {"naive-int2": 0.74, "quarot-int2": 0.21, "klt-int2": 0.12, "oscar": 0.036, "nova": 0.0114}
SKIPPED = {"0": "|mean k|^2 / variance is 41: kept by skip_layers", "15": "kept by skip_layers"}


def metrics(kl: float) -> AttentionMetrics:
    return AttentionMetrics(
        k_error=min(0.9, 0.9 * math.sqrt(kl)), v_error=min(0.8, 0.55 * kl**0.25), k_centred_error=math.sqrt(kl),
        k_query_error=0.4 * kl, qk_error=2.1 * kl, sv_error=0.3 * kl**0.5, kl=kl, kl_geometric=0.6 * kl,
        kl_p95=3.4 * kl, kl_history=1.2 * kl, top1=1 - 0.3 * kl**0.6, top1_history=1 - 0.4 * kl**0.6,
        output_error=0.5 * kl**0.7, output_centred_error=0.8 * kl**0.7,
    )  # fmt: skip


def context_report(context: int, kl: float) -> ContextReport:
    share = 0.0 if kl == 0 else 1 - 384 / context
    return ContextReport(context=context, passages=6, queries=64, quantized_share=share, metrics=metrics(kl))


def storage(context: int) -> BitsEntry:
    windows = 16 * 384 / context
    return BitsEntry(context=context, codes=2.0, metadata=0.5, windows=windows, total=2.5 + windows)


def artifact(name: str, kl: float, seed: int = 0, *, skip: dict[str, str] | None = None) -> ArtifactReport:
    rng = random.Random(seed)
    skip = SKIPPED if skip is None else skip
    quantized = tuple(layer for layer in range(LAYERS) if str(layer) not in skip)
    layers = []
    for layer in quantized:
        level = kl * math.exp(rng.gauss(0, 0.5)) * (4 if layer in (1, 2, 23) else 1)
        heads = tuple(level * math.exp(rng.gauss(0, 1.0)) for _ in range(HEADS))
        layers.append(LayerReport(layer=layer, mean_ratio=rng.expovariate(0.5), metrics=metrics(level), kl_heads=heads))
    return ArtifactReport(
        name=name, method=name.replace("-", "_"), tensors_digest=f"{seed + 1:064x}", windows=Windows(),
        target_context=8192, bits={str(n): storage(n).total for n in CONTEXTS}, storage=tuple(map(storage, CONTEXTS)),
        bytes_per_token=28 * 3 * 40 + 2 * 3 * 256, constants_bytes=28 * 3 * 3 * 64 * 64 * 4,
        quantized_layers=quantized, skipped_layers=skip,
        contexts=tuple(context_report(n, kl * (n / 8192) ** 0.45) for n in CONTEXTS), layers=tuple(layers),
        folds=tuple(FoldDecision(layer=i, fold=i != 7, error=1e-6, reason="folds exactly" if i != 7 else "a norm "
                    "stands between attention and W_O") for i in quantized),
        canary=CanarySummary(file=FileEntry(name="canary-0.safetensors", size=9000, sha256="c" * 64), tokens=1536,
                             deviation=0.4 * kl**0.5),
        warnings=("keys of layers 1-2 have |mean|^2 / variance above 4 and this method does not centre",)
        if kl > 0.1 else (),
    )  # fmt: skip


def reference() -> ArtifactReport:
    return ArtifactReport(
        name="bf16 reference", method="bf16", tensors_digest=None, windows=Windows(), target_context=None,
        bits={str(n): 16.0 for n in CONTEXTS}, bytes_per_token=30 * 3 * 256, quantized_layers=(),
        skipped_layers={}, contexts=tuple(context_report(n, 2e-6) for n in CONTEXTS),
        layers=tuple(LayerReport(layer=i, mean_ratio=1.0, metrics=metrics(2e-6), kl_heads=(2e-6,) * HEADS)
                     for i in range(LAYERS)),
    )  # fmt: skip


def gates(artifacts: list[ArtifactReport], limit: float = 0.05) -> tuple[GateResult, ...]:
    return tuple(
        GateResult(artifact=a.name, metric="kl", context=8192, limit=limit, direction="max",
                   value=a.contexts[-1].metrics.kl, passed=a.contexts[-1].metrics.kl <= limit)
        for a in artifacts
    )  # fmt: skip


IDENTITY = Identity(geometry="a" * 64, vocabulary="b" * 64, norms={"rms_norm_eps": 1e-5}, biases={"attention": False})
PROVENANCE = Provenance(
    source="HuggingFaceTB/SmolLM2-135M-Instruct",
    revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
    weights=(WeightFile(name="model.safetensors", size=269060552, header_sha256="d" * 64, blocks_sha256="e" * 64),),
)


def source(label: str, tokens: int) -> DataSource:
    return DataSource(
        sources=(label,), sha256="e" * 64, template="auto: raw", packing="on", seq_len=8192, wanted_tokens=tokens,
        got_tokens=tokens,
    )  # fmt: skip


def sample_report(*, gated: bool = True) -> Report:
    rows = [artifact(name, kl, seed) for seed, (name, kl) in enumerate(METHODS.items())]
    return Report(
        identity=IDENTITY, provenance=PROVENANCE, data=source("heldout-essays.txt", 65536), semantics="by-query",
        queries_per_context=64, cast="bfloat16", artifacts=(reference(), *rows), gates=gates(rows) if gated else (),
        warnings=("held-out text is 8192 tokens a passage, the target context is 8192",),
        versions={"kvcq": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "python": "3.11.7"},
        command="kvcq validate naive quarot klt oscar nova --model HuggingFaceTB/SmolLM2-135M-Instruct "
                "--data heldout-essays.txt --contexts 2k,4k,8k --gates gates.yaml --out report",
        digest="0" * 64,
    )  # fmt: skip


def sample_manifest() -> Manifest:
    row = artifact("nova", METHODS["nova"], 4)
    k = CodecSpec(transform="metric", centred=True, quantizer="group_vq", codebook="int8")
    v = CodecSpec(transform="orthogonal", clip=0.92)
    geometry = ModelGeometry(
        model_type="llama", hidden_size=576, vocab_size=49152, max_positions=8192,
        layers=tuple(LayerGeometry(layer=i, kind="full", q_heads=9, kv_heads=3, d_k=64, d_v=64) for i in range(LAYERS)),
    )  # fmt: skip
    plan = tuple(
        LayerPlan(layer=i, reason=SKIPPED[str(i)]) if str(i) in SKIPPED else LayerPlan(layer=i, k=k, v=v)
        for i in range(LAYERS)
    )
    return Manifest(
        kvcq="0.1.0", recipe=Recipe(method="nova", params={"iterations": 25, "codebook": "int8"}, target_context=8192),
        stats_digest="1" * 64, identity=IDENTITY, provenance=PROVENANCE, geometry=geometry,
        calibration=source("pydoc-topics", 113019), collected_context=4096, target_context=8192, plan=plan,
        tensors=(TensorEntry(name="layers.1.k.transform", role="k.transform", shape=(3, 64, 64), dtype="F32"),),
        tensors_digest="2" * 64, bits=tuple(map(storage, CONTEXTS)), constants_bytes=4128768, folds=row.folds,
        validation=ValidationSummary(report_sha256="3" * 64, contexts=row.contexts, gates=gates([row])),
        files=(FileEntry(name="kvcq.safetensors", size=4200000, sha256="4" * 64),), digest="5" * 64,
    )  # fmt: skip
