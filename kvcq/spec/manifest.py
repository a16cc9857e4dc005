"""``kvcq.json``: the manifest of a bundle."""

from __future__ import annotations

from typing import Literal

from kvcq.spec.base import SpecModel
from kvcq.spec.files import FileEntry, Sha256, TensorEntry
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.header import DataSource
from kvcq.spec.identity import Identity, Provenance
from kvcq.spec.plan import LayerPlan
from kvcq.spec.recipe import Recipe
from kvcq.spec.report import BitsEntry as BitsEntry
from kvcq.spec.report import ContextReport, FoldDecision, GateResult


class ValidationSummary(SpecModel):
    """What the sealed report says of these tensors."""

    report_sha256: Sha256
    contexts: tuple[ContextReport, ...]
    gates: tuple[GateResult, ...]


class Manifest(SpecModel):
    """The sealed description of a bundle. `digest` is the SHA-256 of the canonical manifest without that field.

    `files` lists every file except the manifest itself; the writer fills in both.
    """

    format: Literal["kvcq.bundle"] = "kvcq.bundle"
    version: Literal[1] = 1
    kvcq: str
    recipe: Recipe
    stats_digest: Sha256
    identity: Identity
    provenance: Provenance
    geometry: ModelGeometry
    calibration: DataSource
    collected_context: int
    target_context: int
    offset_policy: Literal["shift-all"] = "shift-all"
    plan: tuple[LayerPlan, ...]
    tensors: tuple[TensorEntry, ...]
    tensors_digest: Sha256
    bits: tuple[BitsEntry, ...]
    constants_bytes: int
    folds: tuple[FoldDecision, ...]
    validation: ValidationSummary
    files: tuple[FileEntry, ...] = ()
    digest: Sha256 = ""
