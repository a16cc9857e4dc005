"""A small chain of artifacts with every kind of tensor, made from a seed."""

from pathlib import Path

import numpy as np

from kvcq.artifacts.bundle import draft_manifest, write_bundle
from kvcq.artifacts.fit_file import read_fit, write_fit
from kvcq.artifacts.report_file import canary_entry, read_report, write_report
from kvcq.artifacts.stats_file import write_stats
from kvcq.spec.codec import CodecSpec
from kvcq.spec.geometry import LayerGeometry, ModelGeometry, RopeSpec
from kvcq.spec.header import DataSource, FitHeader, StatsHeader
from kvcq.spec.identity import Identity, Provenance
from kvcq.spec.plan import LayerPlan, plan_digest
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

HEADS, DIM = 2, 16
ZERO = "0" * 64
IDENTITY = Identity(geometry=ZERO, vocabulary=ZERO, norms={"rms_norm_eps": 1e-5}, biases={"attention_bias": False})
PROVENANCE = Provenance(source="tiny")
DATA = DataSource(
    sources=("a.txt",), sha256=ZERO, template="auto", packing="on", seq_len=64, wanted_tokens=None, got_tokens=4096
)
METRICS = AttentionMetrics(**dict.fromkeys(AttentionMetrics.model_fields, 0.125))
CONTEXTS = (ContextReport(context=512, passages=2, queries=64, quantized_share=0.5, metrics=METRICS),)


def geometry(layers=3, heads=HEADS, dim=DIM):
    kinds = ["full"] * (layers - 1) + ["sliding"]
    rope = RopeSpec(rotary_dims=dim, inv_freq=tuple(10000.0 ** (-2 * i / dim) for i in range(dim // 2)))
    entries = tuple(
        LayerGeometry(layer=i, kind=kind, q_heads=2 * heads, kv_heads=heads, d_k=dim, d_v=dim, scaling=0.25, rope=0)
        for i, kind in enumerate(kinds)
    )
    return ModelGeometry(model_type="tiny", hidden_size=64, vocab_size=128, ropes=(rope,), layers=entries)


def rotations(rng, heads=HEADS, dim=DIM):
    return np.linalg.qr(rng.standard_normal((heads, dim, dim)))[0].astype(np.float32)


def codebook(rng, heads, dim, prefix):
    raw = rng.standard_normal((heads, dim // 4, 256, 4)).astype(np.float16)
    scale = (np.abs(raw.astype(np.float32)).max((-2, -1)) / 127).astype(np.float32)
    words = np.rint(raw.astype(np.float32) / scale[..., None, None]).clip(-127, 127).astype(np.int8)
    return {f"{prefix}.codebook": words, f"{prefix}.codebook_scale": scale, f"{prefix}.codebook_fp16": raw}


PLAN = (
    LayerPlan(
        layer=0,
        k=CodecSpec(transform="metric", centred=True, quantizer="group_vq", codebook="int8"),
        v=CodecSpec(transform="orthogonal", clip=0.92),
    ),
    LayerPlan(
        layer=1,
        k=CodecSpec(transform="orthogonal", groups=4, clip=0.96),
        v=CodecSpec(quantizer="group_vq", codebook="e4m3"),
    ),
    LayerPlan(layer=2, reason="sliding attention layer"),
)


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    forward = rotations(rng).astype(np.float64) * np.geomspace(1, 1e-3, DIM)
    e4m3 = rng.integers(-16, 16, (HEADS, DIM // 4, 256, 4)).astype(np.float16) / 16
    return {
        "layers.0.k.transform": forward.astype(np.float32),
        "layers.0.k.query": np.linalg.inv(forward).swapaxes(-1, -2).astype(np.float32),
        "layers.0.k.offset": rng.standard_normal((HEADS, DIM)).astype(np.float32),
        **codebook(rng, HEADS, DIM, "layers.0.k"),
        "layers.0.v.transform": rotations(rng),
        "layers.1.k.transform": rotations(rng),
        "layers.1.v.codebook": e4m3,
    }


def stats_header():
    return StatsHeader(
        identity=IDENTITY,
        provenance=PROVENANCE,
        geometry=geometry(),
        data=DATA,
        sequences=(ZERO,),
        probe=(ZERO,),
        tokens=4096,
        longest=64,
        rows=8,
        query_rows=4,
        seed=0,
        dtype="float32",
        chunk=64,
        skipped={"2": "sliding attention layer"},
        versions={"kvcq": "0.1.0"},
    )


def make_stats(out: Path, force=False):
    import torch

    rng = np.random.default_rng(1)
    moments = {
        f"layers.{layer}.k_moment.{limb}": rng.integers(-9, 9, (HEADS, DIM, DIM))
        for layer in (0, 1)
        for limb in ("hi", "lo")
    } | {
        "layers.0.k_min": rng.standard_normal((HEADS, DIM)).astype(np.float32),
    }
    samples = {
        "layers.0.rows.k": torch.from_numpy(rng.standard_normal((HEADS, 8, DIM))).to(torch.bfloat16),
        "probe.0.layers.1.k": torch.ones(HEADS, DIM, 3, dtype=torch.float16).mT,
        "probe.0.positions": torch.arange(3, dtype=torch.int32),
        "rows.positions": torch.arange(8, dtype=torch.int32),
    }
    return write_stats(out, stats_header(), moments, samples, force)


def fit_header(plan=PLAN, shape=None):
    return FitHeader(
        recipe=Recipe(method="nova", params={"iterations": 25, "floor": 1e-6, "codebook": "int8", "tuned": True}),
        stats_digest=ZERO,
        identity=IDENTITY,
        provenance=PROVENANCE,
        geometry=shape or geometry(),
        calibration=DATA,
        collected_context=64,
        target_context=64,
        plan=plan,
        tensors=(),
        tensors_digest="",
        versions={"kvcq": "0.1.0"},
    )


def make_fit(out: Path, force=False, seed=0):
    return write_fit(out, fit_header(), tensors(seed), force)


def canary_arrays():
    rng = np.random.default_rng(2)
    return {"exact": rng.standard_normal((3, 4)).astype(np.float32), "tokens": np.arange(9, dtype=np.int32)}


def report(header, canary="canary-0.safetensors", name="fit"):
    row = ArtifactReport(
        name=name,
        method=header.recipe.method,
        tensors_digest=header.tensors_digest,
        plan_digest=plan_digest(header.plan),
        windows=header.recipe.windows,
        target_context=None,
        bits={"512": 2.5},
        storage=(BitsEntry(context=512, codes=2.0, metadata=0.5, windows=0.0, total=2.5),),
        bytes_per_token=40.0,
        constants_bytes=1024,
        quantized_layers=(0, 1),
        skipped_layers={"2": "sliding attention layer"},
        contexts=CONTEXTS,
        layers=(LayerReport(layer=0, mean_ratio=0.5, metrics=METRICS, kl_heads=(0.1, 0.2)),),
        folds=(FoldDecision(layer=0, fold=True, error=1e-6, reason="exact"),),
        canary=CanarySummary(file=canary_entry(canary, canary_arrays()), tokens=512, deviation=0.1),
    )
    gate = GateResult(artifact=name, metric="kl", context=512, limit=0.2, direction="max", value=0.125, passed=True)
    return Report(
        identity=header.identity,
        provenance=header.provenance,
        data=DATA,
        semantics="by-query",
        queries_per_context=64,
        cast="bfloat16",
        artifacts=(row,),
        gates=(gate,),
        versions={"kvcq": "0.1.0"},
    )


def make_report(out: Path, header, force=False, html="<p>ok</p>"):
    return write_report(out, report(header), html, {"canary-0.safetensors": canary_arrays()}, {"seconds": 1.5}, force)


def make_chain(folder: Path):
    """Write stats, fit, report, a bundle folder and a bundle archive; return their paths by kind."""
    paths = {kind: folder / kind for kind in ("stats", "fit", "report", "bundle")} | {"archive": folder / "tiny.kvcq"}
    make_stats(paths["stats"])
    make_report(paths["report"], make_fit(paths["fit"]))
    fit, measured = read_fit(paths["fit"]), read_report(paths["report"])
    manifest = draft_manifest(fit, measured)
    for kind in ("bundle", "archive"):
        write_bundle(paths[kind], manifest, fit, measured, "# tiny\n", archive=kind == "archive")
    return paths
