"""What ``config.json`` of a local model states plainly, compared with a bundle before any library of models is loaded.

Only what is written in the file, or replaced by a user, is read: what a type of models adds by itself is known to its
library alone, which compares the rest seconds later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcq.artifacts.bundle import Bundle
from kvcq.errors import MismatchError, UnsupportedError, shown
from kvcq.models.fingerprint import BIAS_FLAGS, NORM_FLAGS, flags_of
from kvcq.models.source import ModelSource
from kvcq.pipeline.sglang.vocabulary import stated_vocabulary
from kvcq.runtime.sglang.facts import TEXT_CONFIGS, ModelFacts, model_facts
from kvcq.runtime.sglang.frequencies import differs
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.identity import Identity

# By field of a geometry.
WHOLE = {
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
}
# By field of a full-attention layer; a model may give some layers a number of their own.
LAYER = {
    "q_heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads", "num_global_key_value_heads"),
    "d_k": ("head_dim", "global_head_dim"),
}
# Traits that may come and go with what a type of models adds by itself.
UNSURE = {"sliding", "heads"}
# Names that are the same in every release of the library.
ROPES = ("default", "linear", "yarn", "llama3")


def weight_bytes(source: ModelSource) -> int:
    """Return the bytes of a local model's weight files, 0 where they are not known yet."""
    folder = Path(source.location)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) if source.kind == "folder" else 0


def check_stated(source: ModelSource, overrides: Mapping[str, Any], bundle: Bundle) -> None:
    """Refuse a folder whose configuration or vocabulary contradicts the bundle; other sources pass.

    Args:
        source: The model.
        overrides: Fields that a user replaces in its configuration.
        bundle: What is to be served.

    Raises:
        MismatchError: another model; names the field and both numbers.
    """
    config = {**read_config(source), **overrides}
    text = next((config[key] for key in TEXT_CONFIGS if isinstance(config.get(key), Mapping)), config)
    manifest = bundle.manifest
    geometry, identity = manifest.geometry, manifest.identity
    for name, ours, theirs in (*_numbers(text, geometry), *_rotary(text, geometry), *_flagged(text, identity)):
        raise MismatchError(
            f"the bundle was fitted for another model: {name} is {shown(theirs)}, that of the bundle {shown(ours)}",
            where=f"{source.label} config.json",
            fix=f"load {manifest.provenance.source}, or collect and fit for {source.label}",
        )
    vocabulary = stated_vocabulary(Path(source.location)) if source.kind == "folder" else None
    # A bundle of a model without a tokenizer knows no vocabulary; the rest is the library's to tell.
    if vocabulary is not None and len(identity.vocabulary) == len(vocabulary) and identity.vocabulary != vocabulary:
        raise MismatchError(
            "the bundle was fitted for another model: vocabulary differs",
            where=f"{source.label} tokenizer.json",
            fix=f"load {manifest.provenance.source}, or collect and fit for {source.label}",
        )


def stated_facts(source: ModelSource, overrides: Mapping[str, Any]) -> ModelFacts | None:
    """Return what a folder's configuration shows beyond doubt; None for other sources, or one that states too little.

    Of the facts, numbers of heads and channels may still be another type's defaults.
    """
    config = read_config(source)
    if not config:
        return None
    try:
        facts = model_facts({**config, **overrides})
    except UnsupportedError:
        # The library that reads it for good says what is wrong with it.
        return None
    return replace(facts, traits=facts.traits - UNSURE)


def read_config(source: ModelSource) -> dict[str, Any]:
    """Return the configuration; a file that is none is told by the library that reads it for good."""
    if source.kind != "folder":
        return {}
    try:
        found = json.loads((Path(source.location) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _numbers(text: Mapping[str, Any], geometry: ModelGeometry) -> Iterator[tuple[str, Any, Any]]:
    """Yield each field that differs: its name, the bundle's number, and the stated one."""
    pairs = [("num_hidden_layers", len(geometry.layers))]
    pairs += [(name, getattr(geometry, field)) for field, name in WHOLE.items()]
    for name, ours in pairs:
        theirs = _number(text.get(name))
        if None not in (ours, theirs) and ours != theirs:
            yield name, ours, theirs
    for layer in geometry.quantizable():
        for field, names in LAYER.items():
            ours, stated = getattr(layer, field), {name: _number(text.get(name)) for name in names}
            found = {name: value for name, value in stated.items() if value}
            if found and ours not in found.values():
                yield next((f"{name} of layer {layer.layer}", ours, value) for name, value in found.items())


def _flagged(text: Mapping[str, Any], identity: Identity) -> Iterator[tuple[str, Any, Any]]:
    """Yield each flag of norms and biases that is stated, and is another in the bundle."""
    stated = flags_of(text, (*NORM_FLAGS, *BIAS_FLAGS))
    for name, ours in {**identity.norms, **identity.biases}.items():
        if stated.get(name, ours) != ours:
            yield name, ours, stated[name]


def _number(value: Any) -> int | None:
    return value if type(value) is int else None


def _rotary(text: Mapping[str, Any], geometry: ModelGeometry) -> Iterator[tuple[str, Any, Any]]:
    """Yield the kind of RoPE or its base, where the model has one kind for all layers."""
    settings = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if len(geometry.ropes) != 1 or not isinstance(settings, Mapping):
        return
    rope = geometry.ropes[0]
    kind = settings.get("rope_type") or settings.get("type")
    if kind in ROPES and not rope.by_length and kind != rope.regime:
        yield "rope_type", rope.regime, kind
    theta, pairs = settings.get("rope_theta", text.get("rope_theta")), len(rope.inv_freq)
    if rope.regime != "default" or kind not in (None, "default") or not isinstance(theta, int | float):
        return
    if theta > 0 and pairs > 1 and differs(rope, {"rope_type": "default", "rope_theta": theta}, rope.rotary_dims):
        yield "rope_theta", round(rope.inv_freq[-1] ** (rope.rotary_dims / 2 / (1 - pairs)), 1), theta
