"""Refusals: which artifact fits which model, and what a host cannot do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from kvcq.errors import MismatchError
from kvcq.models.identity import NO_VOCABULARY
from kvcq.models.load import LoadedModel
from kvcq.models.outline import Outline
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.identity import Identity, Provenance

HEAD_FIELDS = ("q_heads", "kv_heads", "d_k", "d_v", "sinks")
ROPE_FIELDS = ("rotary_dims", "offset", "pairing", "sense")
# A model in memory may come without its tokenizer: then the vocabulary cannot be compared.
UNKNOWN = ("vocabulary", NO_VOCABULARY)


class Fitted(Protocol):
    """What an artifact says of the model that it was fitted for."""

    @property
    def name(self) -> str:
        """Name for messages."""

    @property
    def identity(self) -> Identity:
        """What must match."""

    @property
    def provenance(self) -> Provenance:
        """What is compared and only warned of."""

    @property
    def geometry(self) -> ModelGeometry:
        """As observed at collection."""


@dataclass(frozen=True)
class Sealed:
    """What a bundle's manifest says of the model, under the name that messages use."""

    name: str
    identity: Identity
    provenance: Provenance
    geometry: ModelGeometry


def check_model(fitted: Fitted, loaded: LoadedModel | Outline, *, strict: bool) -> tuple[str, ...]:
    """Refuse a model that the artifact was not fitted for; return warnings when only its provenance differs.

    A model without known weight files, made in memory, is not warned of; only `strict` refuses it.

    Raises:
        MismatchError: identity differs, or provenance with `strict`.
    """
    ours, theirs = fitted.identity.plain(), loaded.identity.plain()
    differing = [field for field in ours if ours[field] != theirs[field] and (field, theirs[field]) != UNKNOWN]
    if differing:
        verb = "differ" if len(differing) > 1 else "differs"
        raise MismatchError(
            f"the artifact was fitted for another model: {', '.join(differing)} {verb}",
            where=fitted.name,
            fix=f"load {fitted.provenance.source}, or collect and fit for {loaded.provenance.source}",
        )
    warnings = []
    if fitted.geometry.length_regimes() != loaded.geometry.length_regimes():
        pair = " and ".join(", ".join(geometry.length_regimes()) for geometry in (fitted.geometry, loaded.geometry))
        warnings.append(f"fitted and measured in different RoPE regimes ({pair})")
    if other := _other_origin(fitted.provenance, loaded.provenance, strict):
        if strict:
            raise MismatchError(
                f"{fitted.name}: fitted on {other}",
                where="--strict",
                fix="load the weights that the artifact was fitted on",
            )
        warnings.append(f"fitted on {other}")
    return tuple(warnings)


def check_frame(fitted: Fitted, observed: ModelGeometry) -> None:
    """Refuse an artifact whose heads or rotations are not those that the self-check has just seen.

    The identity says so of an honest artifact; this is what the codecs are built from.

    Raises:
        MismatchError: names the layer and the field.
    """
    ours = {layer.layer: layer for layer in fitted.geometry.layers}
    for layer in observed.quantizable():
        own = ours.get(layer.layer)
        if own is None or own.kind != layer.kind:
            raise MismatchError("the artifact does not know this full-attention layer", where=f"layer {layer.layer}")
        pairs = [(name, getattr(own, name), getattr(layer, name)) for name in HEAD_FIELDS]
        theirs, mine = fitted.geometry.rope_of(own), observed.rope_of(layer)
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
                    where=f"{fitted.name}, layer {layer.layer}",
                    fix="collect and fit for this model",
                )


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-4)


def _other_origin(theirs: Provenance, ours: Provenance, strict: bool) -> str | None:
    """Say how the model that an artifact was fitted on differs from the loaded one, or None.

    Weight files decide; a hub id and its revision count only where both sides have them, so that a local copy of the
    same files is the same model.
    """
    if theirs.weights != ours.weights and (ours.weights or strict):
        return f"other weights ({theirs.source}, not {ours.source})"
    if theirs.revision and ours.revision and theirs.revision != ours.revision:
        return f"another revision ({theirs.revision}, not {ours.revision})"
    return None
