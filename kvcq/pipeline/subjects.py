"""What validate measures: a fit or a bundle, reduced to what both say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvcq.artifacts.bundle import Bundle
from kvcq.artifacts.fit_file import FitArtifact
from kvcq.artifacts.verify import read_any
from kvcq.codecs.pair import HeadCodec, layer_roles
from kvcq.errors import InputError, MismatchError
from kvcq.pipeline.regimes import regimes
from kvcq.spec.files import TensorEntry
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.header import FitHeader
from kvcq.spec.identity import Identity, Provenance
from kvcq.spec.manifest import Manifest
from kvcq.spec.plan import LayerPlan, Windows

if TYPE_CHECKING:
    import numpy as np

    from kvcq.models.load import LoadedModel

SERVED_CAST = torch.bfloat16
HEAD_FIELDS = ("q_heads", "kv_heads", "d_k", "d_v", "sinks")
ROPE_FIELDS = ("rotary_dims", "offset", "pairing", "sense")


@dataclass(frozen=True)
class Subject:
    """One artifact under measurement; `tensors` by full name."""

    name: str
    method: str
    windows: Windows
    target_context: int
    identity: Identity
    provenance: Provenance
    geometry: ModelGeometry
    plan: tuple[LayerPlan, ...]
    index: tuple[TensorEntry, ...]
    tensors_digest: str
    tensors: dict[str, np.ndarray]

    @property
    def quantized(self) -> tuple[int, ...]:
        """Ids of the layers that are stored in codes."""
        return tuple(entry.layer for entry in self.plan if entry.quantized)

    def codecs(self, device: torch.device | str) -> dict[int, HeadCodec]:
        """Build the codecs of the quantized layers in the dtype that serving holds them in."""
        layers = {layer.layer: layer for layer in self.geometry.layers}
        return {
            entry.layer: HeadCodec.build(
                entry, layers[entry.layer], layer_roles(self.tensors, entry.layer), cast=SERVED_CAST, device=device
            )
            for entry in self.plan
            if entry.quantized
        }


def open_subjects(paths: Sequence[Path]) -> list[Subject]:
    """Read fits and bundles, verified, and name them by their folders.

    Raises:
        InputError: none given, or a path that is neither a fit nor a bundle.
        CorruptArtifactError: a damaged artifact.
    """
    if not paths:
        raise InputError("no artifact to validate", fix="name at least one fit folder or bundle")
    subjects: list[Subject] = []
    for path in paths:
        name = path.resolve().name.removesuffix(".kvcq")
        taken = {subject.name for subject in subjects}
        numbered = (f"{name}-{number}" for number in count(2))
        subjects.append(_open(path, name if name not in taken else next(n for n in numbered if n not in taken)))
    return subjects


def _open(path: Path, name: str) -> Subject:
    artifact = read_any(path)
    header: FitHeader | Manifest
    if isinstance(artifact, FitArtifact):
        header = artifact.header
    elif isinstance(artifact, Bundle):
        header = artifact.manifest
    else:
        raise InputError("neither a fit nor a bundle", where=path, fix="name a folder written by kvcq fit or pack")
    return Subject(
        name=name,
        method=header.recipe.method,
        windows=header.recipe.windows,
        target_context=header.target_context,
        identity=header.identity,
        provenance=header.provenance,
        geometry=header.geometry,
        plan=header.plan,
        index=header.tensors,
        tensors_digest=header.tensors_digest,
        tensors=artifact.tensors,
    )


def check_model(subject: Subject, loaded: LoadedModel, *, strict: bool) -> tuple[str, ...]:
    """Refuse a model that the artifact was not fitted for; return warnings when only its provenance differs.

    Raises:
        MismatchError: identity differs, or provenance with `strict`.
    """
    ours, theirs = subject.identity.plain(), loaded.identity.plain()
    differing = [field for field in ours if ours[field] != theirs[field]]
    if differing:
        raise MismatchError(
            f"the artifact was fitted for another model: {', '.join(differing)} differ",
            where=subject.name,
            fix=f"load {subject.provenance.source}, or collect and fit for {loaded.provenance.source}",
        )
    warnings = []
    if regimes(subject.geometry) != regimes(loaded.geometry):
        pair = " and ".join(", ".join(regimes(geometry)) for geometry in (subject.geometry, loaded.geometry))
        warnings.append(f"fitted and measured in different RoPE regimes ({pair})")
    if other := _other_origin(subject.provenance, loaded.provenance):
        if strict:
            raise MismatchError(
                f"{subject.name}: fitted on {other}",
                where="--strict",
                fix="load the weights that the artifact was fitted on",
            )
        warnings.append(f"fitted on {other}")
    return tuple(warnings)


def check_frame(subject: Subject, observed: ModelGeometry) -> None:
    """Refuse an artifact whose heads or rotations are not those that the self-check has just seen.

    The identity says so of an honest artifact; this is what the codecs are built from.

    Raises:
        MismatchError: names the layer and the field.
    """
    ours = {layer.layer: layer for layer in subject.geometry.layers}
    for layer in observed.quantizable():
        own = ours.get(layer.layer)
        if own is None or own.kind != layer.kind:
            raise MismatchError("the artifact does not know this full-attention layer", where=f"layer {layer.layer}")
        pairs = [(name, getattr(own, name), getattr(layer, name)) for name in HEAD_FIELDS]
        theirs, mine = subject.geometry.rope_of(own), observed.rope_of(layer)
        pairs.append(("rope", theirs is None, mine is None))
        if theirs is not None and mine is not None:
            pairs += [(f"rope.{name}", getattr(theirs, name), getattr(mine, name)) for name in ROPE_FIELDS]
            # Frequencies of another regime differ by design, which is warned of; their last bits differ by device.
            if theirs.regime == mine.regime and not all(map(_close, theirs.inv_freq, mine.inv_freq)):
                pairs.append(("rope.inv_freq", theirs.inv_freq[:4], mine.inv_freq[:4]))
        for name, found, wanted in pairs:
            if found != wanted:
                raise MismatchError(
                    f"the artifact's frame is not the model's: {name} is {found}, the model has {wanted}",
                    where=f"{subject.name}, layer {layer.layer}",
                    fix="collect and fit for this model",
                )


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-4)


def _other_origin(theirs: Provenance, ours: Provenance) -> str | None:
    """Say how the model that an artifact was fitted on differs from the loaded one, or None.

    Weight files decide; a hub id and its revision count only where both sides have them, so that a local copy of the
    same files is the same model.
    """
    if theirs.weights != ours.weights:
        return f"other weights ({theirs.source}, not {ours.source})"
    if theirs.revision and ours.revision and theirs.revision != ours.revision:
        return f"another revision ({theirs.revision}, not {ours.revision})"
    return None
