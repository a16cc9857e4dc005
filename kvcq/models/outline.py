"""A model without its weights: what configuration, tokenizer and the heads of its files say of who it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig

from kvcq.errors import UnsupportedError
from kvcq.models.failures import loading
from kvcq.models.geometry import HEAD_DIM_FIELDS, KV_HEAD_FIELDS, refuse_by_config
from kvcq.models.identity import (
    BIAS_FLAGS,
    NORM_FLAGS,
    build_provenance,
    geometry_digest,
    stated_flags,
    vocabulary_digest,
)
from kvcq.models.library import quiet_library
from kvcq.models.load import Notify, model_location, reach_hub, read_tokenizer, silent
from kvcq.models.source import ModelSource, resolve_source
from kvcq.spec.geometry import LayerGeometry, ModelGeometry
from kvcq.spec.identity import Identity, Provenance


@dataclass(frozen=True)
class Outline:
    """What is known of a model before it is loaded.

    Attributes:
        source: Where it comes from.
        location: What loads it: a folder, or a hub id.
        identity: As `kvcq.models.load` would find it, if the model behaves as the fitted geometry does.
        provenance: Its weight files, where they are on this machine.
        geometry: The fitted one, with every field that the configuration contradicts replaced.
        weight_bytes: Bytes of its weight files, 0 if they are not on this machine.
        config: The whole configuration with the overrides, as plain values.
    """

    source: ModelSource
    location: str
    identity: Identity
    provenance: Provenance
    geometry: ModelGeometry
    weight_bytes: int
    config: dict[str, Any]


def load_outline(
    name: str,
    fitted: ModelGeometry,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    overrides: Mapping[str, Any] | None = None,
    cache_dir: Path | None = None,
    notify: Notify = silent,
) -> Outline:
    """Read everything of a model but its weights, within seconds.

    The digest of a geometry is over what a run shows; here the fitted geometry stands in for the run, corrected by
    the configuration: another number of layers or heads, another context, vocabulary or RoPE gives another identity.

    Args:
        name: See `resolve_source`.
        fitted: Geometry of the artifact that the model is compared with.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run Python code that the model brings along.
        overrides: Fields that a server replaces in the configuration.
        cache_dir: Folder for converted models.
        notify: Receives one line for each slow step.

    Raises:
        InputError: no such model, unreadable files, no tokenizer.
        UnsupportedError: an architecture that kvcq refuses, or code that it would have to trust.
        UnavailableError: offline, gated.
    """
    source = resolve_source(name, revision)
    location = model_location(source, cache_dir, notify)
    local = source.kind != "hub"
    options: dict[str, Any] = {
        "revision": source.revision,
        "trust_remote_code": trust_remote_code,
        "local_files_only": local,
    }
    with loading(source.label), quiet_library():
        if not local:
            reach_hub(source)
        whole = AutoConfig.from_pretrained(location, **options)
        whole.update(dict(overrides or {}))
        refuse_by_config(whole)
        tokenizer = read_tokenizer(location, source, options, needed=True)
    config = whole.get_text_config(decoder=True)
    geometry = _corrected(fitted, whole.model_type, config)
    identity = Identity(
        geometry=geometry_digest(geometry, getattr(config, "rope_parameters", None)),
        vocabulary=vocabulary_digest(tokenizer),
        norms=stated_flags(config, NORM_FLAGS),
        biases=stated_flags(config, BIAS_FLAGS),
    )
    commit = getattr(whole, "_commit_hash", None)
    folder = Path(location) if local else _snapshot(location, commit)
    weights = [] if folder is None else list(folder.glob("*.safetensors"))
    return Outline(
        source=source,
        location=location,
        identity=identity,
        provenance=build_provenance(source.label, commit if not local else None, folder),
        geometry=geometry,
        weight_bytes=sum(path.stat().st_size for path in weights),
        config=whole.to_dict(),
    )


def _corrected(fitted: ModelGeometry, model_type: str, config: Any) -> ModelGeometry:
    """Return the fitted geometry as the configuration would have it."""
    number = getattr(config, "num_hidden_layers", len(fitted.layers))
    if not isinstance(number, int) or number < 1:
        raise UnsupportedError("the configuration says no number of layers", where=f"model_type {model_type}")
    layers = [_layer(layer, config) for layer in fitted.layers[:number]]
    for layer in range(len(layers), number):
        layers.append(layers[-1].model_copy(update={"layer": layer}))
    return fitted.model_copy(
        update={
            "model_type": model_type,
            "hidden_size": getattr(config, "hidden_size", fitted.hidden_size),
            "vocab_size": getattr(config, "vocab_size", fitted.vocab_size),
            "max_positions": getattr(config, "max_position_embeddings", None),
            "layers": tuple(layers),
        }
    )


def _layer(layer: LayerGeometry, config: Any) -> LayerGeometry:
    """Correct the heads of one layer; what the configuration does not state stays."""
    if layer.kind != "full":
        return layer
    found = {
        "q_heads": _stated(config, ("num_attention_heads",)),
        "kv_heads": _stated(config, KV_HEAD_FIELDS),
        "d_k": _stated(config, HEAD_DIM_FIELDS),
    }
    changed = {name: min(values) for name, values in found.items() if values and getattr(layer, name) not in values}
    return layer.model_copy(update=changed)


def _stated(config: Any, names: tuple[str, ...]) -> set[int]:
    """Return the numbers of these fields that `config.json` or the type's defaults set."""
    plain = config.to_dict()
    return {value for name in names if isinstance(value := plain.get(name), int)}


def _snapshot(location: str, commit: str | None) -> Path | None:
    config = try_to_load_from_cache(location, "config.json", revision=commit)
    return Path(config).parent if isinstance(config, str) else None
