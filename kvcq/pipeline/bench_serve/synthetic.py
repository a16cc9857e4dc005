"""Bundles for any geometry without a model: valid and as fast as fitted ones, but good for nothing else.

Transforms are random rotations, codebooks random words, and the canary is noise: `kvcq serve` does not serve such a
bundle, because no server answers as the canary says. Its recipe and provenance call it synthetic.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcq.artifacts.bundle import draft_manifest, write_bundle
from kvcq.artifacts.expected import expected_tensors
from kvcq.artifacts.fit_file import read_fit, write_fit
from kvcq.artifacts.report_file import canary_entry, read_report, write_report
from kvcq.errors import InputError
from kvcq.evaluation.canary import POSITIONS, TOP, canary_boundary, canary_length
from kvcq.runtime.layout import bits_per_element, constants_bytes, kv_bytes_per_token
from kvcq.spec.codec import CodecSpec
from kvcq.spec.geometry import LayerGeometry, ModelGeometry
from kvcq.spec.header import DataSource, FitHeader
from kvcq.spec.identity import Identity, Provenance
from kvcq.spec.manifest import Manifest
from kvcq.spec.plan import LayerPlan, Windows, plan_digest
from kvcq.spec.recipe import Recipe
from kvcq.spec.report import ArtifactReport, CanarySummary, Report
from kvcq.version import __version__

# As `oscar` and `nova` plan them.
KINDS: dict[str, tuple[CodecSpec, CodecSpec]] = {
    "int2": (CodecSpec(transform="orthogonal", clip=0.96), CodecSpec(transform="orthogonal", clip=0.92)),
    "vq": (
        CodecSpec(transform="metric", centred=True, quantizer="group_vq", codebook="int8"),
        CodecSpec(transform="orthogonal", clip=0.92),
    ),
}
SOURCE = "synthetic: random tensors, no model"
WARNING = "synthetic: random rotations and codebooks; nothing here says anything about accuracy"
CANARY = "canary-0.safetensors"
CARD = f"# Synthetic bundle\n\n{WARNING.capitalize()}. Made to time servers with `kvcq bench serve`.\n"
NOTHING = "0" * 64
INT8_MAX = 127


def write_synthetic(
    out: Path,
    kind: str,
    geometry: ModelGeometry,
    identity: Identity,
    *,
    windows: Windows | None = None,
    seed: int = 0,
    force: bool = False,
) -> Manifest:
    """Write a bundle and return its manifest; same arguments, same bytes.

    Args:
        out: Folder ``NAME.kvcq``.
        kind: ``int2``, rotated keys and values in INT2 as `oscar` codes them; ``vq``, keys in product codebooks in a
            metric as `nova` codes them, values in INT2.
        geometry: Of the model that it is to be served with; layers that are no full attention stay BF16.
        identity: Likewise.
        windows: S and W; None: the usual ones.
        seed: Of every random choice.
        force: Replace an existing bundle.

    Raises:
        InputError: no such kind; the output exists.
    """
    if kind not in KINDS:
        raise InputError(f"{kind!r} is no kind", where="--kinds", fix=f"use {', '.join(KINDS)}")
    plan = tuple(_plan(layer, kind) for layer in geometry.layers)
    longest = geometry.max_positions or 1
    header = FitHeader(
        recipe=Recipe(method=f"synthetic-{kind}", params={"synthetic": True}, windows=windows or Windows(), seed=seed),
        stats_digest=NOTHING,
        identity=identity,
        provenance=Provenance(source=SOURCE),
        geometry=geometry,
        calibration=DataSource(
            sources=("synthetic",), sha256=NOTHING, template="raw", packing="off", seq_len=1, got_tokens=0
        ),
        collected_context=longest,
        target_context=longest,
        plan=plan,
        tensors=(),
        tensors_digest="",
        warnings=(WARNING,),
        versions={"kvcq": __version__},
    )
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(prefix="kvcq-synthetic-") as folder:
        fit, report = Path(folder) / "fit", Path(folder) / "report"
        canary = _canary(header.recipe.windows, rng)
        header = write_fit(fit, header, _tensors(plan, geometry, rng))
        write_report(report, _report(header, canary), "<p>synthetic</p>", {CANARY: canary}, {})
        found, measured = read_fit(fit), read_report(report)
        manifest = draft_manifest(found, measured)
        return write_bundle(out, manifest, found, measured, CARD, force=force)


def _plan(layer: LayerGeometry, kind: str) -> LayerPlan:
    if layer.kind != "full":
        return LayerPlan(layer=layer.layer, reason=f"{layer.kind} attention layer")
    k, v = KINDS[kind]
    return LayerPlan(layer=layer.layer, k=k, v=v)


def _tensors(plan: tuple[LayerPlan, ...], geometry: ModelGeometry, rng: np.random.Generator) -> dict[str, NDArray]:
    found: dict[str, NDArray] = {}
    for name, wanted in expected_tensors(plan, geometry).items():
        role, shape = wanted.entry.role[2:], wanted.entry.shape
        if role == "transform":
            found[name] = rotations(rng, shape[0], shape[1])
        elif role == "query":
            # The inverse transpose of a rotation is itself; nobody measures time by condition numbers.
            found[name] = found[name.removesuffix("query") + "transform"]
        elif role == "offset":
            found[name] = rng.standard_normal(shape, dtype=np.float32)
        elif role == "codebook":
            words = rng.integers(-INT8_MAX, INT8_MAX, shape, dtype=np.int8, endpoint=True)
            # Each group uses the whole range, and its scale is a float32 quotient: snapping them again changes nothing.
            words[:, :, 0, 0] = INT8_MAX
            # Coordinates have the variance of unit rows.
            scale = (3**0.5 * rng.uniform(0.8, 1.2, shape[:2])).astype(np.float32) / np.float32(INT8_MAX)
            found[name], found[f"{name}_scale"] = words, scale
            found[f"{name}_fp16"] = (words * scale[..., None, None]).astype(np.float16)
    return found


def rotations(rng: np.random.Generator, heads: int, d: int) -> NDArray:
    """Return random rotations float32 ``[heads, d, d]``, one a head: products of reflections, so no decomposition."""
    turned = np.broadcast_to(np.eye(d), (heads, d, d))
    for _ in range(16):
        axis = rng.standard_normal((heads, d, 1))
        axis /= np.linalg.norm(axis, axis=1, keepdims=True)
        turned = turned - 2 * (turned @ axis) @ axis.swapaxes(1, 2)
    return turned.astype(np.float32)


def _canary(windows: Windows, rng: np.random.Generator) -> dict[str, NDArray]:
    """Return arrays in the form of a canary; tokens below 256 exist in every vocabulary."""
    length, boundary = canary_length(windows), canary_boundary(windows)
    positions = np.linspace(boundary, length - 2, POSITIONS).astype(np.int32)
    shape = (3, POSITIONS, TOP)
    exact = -rng.random(shape, dtype=np.float32)
    return {
        "tokens": rng.integers(0, 256, (3, length), dtype=np.int32),
        "positions": positions,
        "ids": np.broadcast_to(np.arange(TOP, dtype=np.int32), shape).copy(),
        "b": exact,
        "s": exact + rng.standard_normal(shape, dtype=np.float32),
    }


def _report(header: FitHeader, canary: dict[str, NDArray]) -> Report:
    windows, quantized = header.recipe.windows, tuple(entry.layer for entry in header.plan if entry.quantized)
    bits = bits_per_element(header.plan, header.geometry, windows, header.target_context)
    row = ArtifactReport(
        name=header.recipe.method,
        method=header.recipe.method,
        tensors_digest=header.tensors_digest,
        plan_digest=plan_digest(header.plan),
        windows=windows,
        target_context=None,
        bits={str(bits.context): bits.total},
        storage=(bits,),
        bytes_per_token=kv_bytes_per_token(header.plan, header.geometry),
        constants_bytes=constants_bytes(header.tensors),
        quantized_layers=quantized,
        skipped_layers={str(entry.layer): entry.reason for entry in header.plan if entry.reason is not None},
        contexts=(),
        layers=(),
        canary=CanarySummary(file=canary_entry(CANARY, canary), tokens=canary["tokens"].shape[1], deviation=1.0),
        warnings=(WARNING,),
    )
    return Report(
        identity=header.identity,
        provenance=header.provenance,
        data=header.calibration,
        semantics="served",
        chunk=canary_boundary(windows),
        queries_per_context=1,
        cast="bfloat16",
        artifacts=(row,),
        warnings=(WARNING,),
        versions=header.versions,
    )
