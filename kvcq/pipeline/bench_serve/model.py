"""The model of a run: a folder that is there, or one without weights with the bundles for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcq.artifacts.bundle import Bundle
from kvcq.artifacts.verify import read_any
from kvcq.errors import InputError
from kvcq.models.load import model_location
from kvcq.models.outline import load_outline
from kvcq.models.source import ModelSource, resolve_source
from kvcq.models.weightless import LOAD_FORMAT, config_geometry, shape_config, step_weights, write_model
from kvcq.pipeline.bench_serve.request import ServeBenchRequest
from kvcq.pipeline.bench_serve.synthetic import write_synthetic
from kvcq.pipeline.progress import SILENT, Reporter
from kvcq.pipeline.sglang.arguments import read_given
from kvcq.pipeline.sglang.stated import read_config
from kvcq.reports.text import plural
from kvcq.runtime.layout import kv_bytes_per_token
from kvcq.spec.plan import Windows


@dataclass(frozen=True)
class Subject:
    """What all arms serve.

    Attributes:
        model: As it was named.
        location: What SGLang loads: a folder, or a hub id.
        label: What it is called in tables.
        bundles: By the name of their arm.
        flags: That its weights need, if they are random ones.
        config: Its configuration, empty where it is not on this machine yet.
    """

    model: str
    location: str
    label: str
    bundles: dict[str, tuple[Path, Bundle]]
    flags: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def synthetic(self) -> bool:
        """Whether weights are random, so that no answer proves anything."""
        return bool(self.flags)

    @property
    def weights(self) -> int | None:
        """Bytes of weights that a decode step reads; None where they are not known."""
        return step_weights(dict(self.config)) if self.config else None

    @property
    def recent(self) -> int:
        """The largest recent window of the bundles, the usual one where there are none."""
        windows = [bundle.manifest.recipe.windows for _, bundle in self.bundles.values()]
        return max((found.recent for found in windows), default=Windows().recent)

    @property
    def bf16_cell(self) -> int | None:
        """Bytes of a BF16 token in all layers."""
        for _, bundle in self.bundles.values():
            return round(kv_bytes_per_token((), bundle.manifest.geometry))
        config = self.config
        names = ("num_hidden_layers", "num_key_value_heads", "head_dim")
        if any(not isinstance(config.get(name), int) for name in names):
            return None
        layers, heads, d = (int(config[name]) for name in names)
        return layers * heads * 2 * d * 2


def make_subject(request: ServeBenchRequest, folder: Path, reporter: Reporter) -> Subject:
    """Open what is named, or write what is asked for into a folder.

    Raises:
        InputError: neither a model nor a shape; not a bundle; two of one name.
        CorruptArtifactError: a damaged bundle.
    """
    if request.synthetic is not None:
        return _synthetic(request, folder, reporter)
    if request.model is None:
        raise InputError("no model", where="--model", fix="name one, or use --synthetic qwen3-8b")
    bundles = open_bundles(request.bundles, reporter)
    source, location = find_model(request.model, reporter)
    config = _config(source, location)
    overrides = read_given(request.arguments).overrides
    return Subject(request.model, location, source.label, bundles, config={**config, **overrides} if config else {})


def open_bundles(paths: Sequence[Path], reporter: Reporter) -> dict[str, tuple[Path, Bundle]]:
    """Open and verify bundles; return them by the names of their arms.

    Raises:
        InputError: not a bundle; two of one name.
        CorruptArtifactError: a damaged one.
    """
    bundles: dict[str, tuple[Path, Bundle]] = {}
    for path in paths:
        reporter.stage(f"verifying {path.name}")
        found = read_any(path)
        if not isinstance(found, Bundle):
            raise InputError("not a bundle", where=path, fix="name a .kvcq that kvcq pack has written")
        name = path.stem
        if name in bundles:
            raise InputError(f"two bundles are called {name}", where="--bundle", fix="rename one")
        bundles[name] = path, found
    return bundles


def check_model(name: str) -> None:
    """Refuse a model that is none, as far as that is known without loading or fetching anything.

    Raises:
        InputError: see `kvcq.models.source.resolve_source`; a folder without a configuration that can be read.
    """
    source = resolve_source(name)
    if source.kind == "folder":
        _config(source, model_location(source, None, SILENT.note))


def find_model(name: str, reporter: Reporter) -> tuple[ModelSource, str]:
    """Return where a model comes from and what SGLang loads; what kvcq converts, or fetches, is in its cache then.

    Raises:
        InputError: no such model, or a damaged file.
        UnavailableError: a builtin model, offline.
    """
    source = resolve_source(name)
    return source, model_location(source, None, reporter.note)


def _config(source: ModelSource, location: str) -> dict[str, Any]:
    """Return the configuration of a folder, empty for a hub id."""
    if source.kind == "hub":
        return {}
    config = read_config(ModelSource("folder", location))
    if not config:
        raise InputError("config.json cannot be read", where=source.label, fix="fetch the model again")
    return config


def _synthetic(request: ServeBenchRequest, folder: Path, reporter: Reporter) -> Subject:
    name = request.synthetic or ""
    config = shape_config(name, request.layers)
    geometry, model = config_geometry(config), folder / name
    write_model(model, config)
    identity = load_outline(str(model), geometry).identity
    bundles = {}
    for kind in request.kinds:
        reporter.stage(f"making a synthetic bundle, {kind}")
        path = folder / f"{kind}.kvcq"
        write_synthetic(path, kind, geometry, identity, seed=request.seed)
        bundle = read_any(path)
        if not isinstance(bundle, Bundle):
            raise InputError("not a bundle", where=path)
        bundles[kind] = path, bundle
    layers = len(geometry.layers)
    return Subject(
        str(model), str(model), f"{name}, {plural(layers, 'layer')}, random weights", bundles, LOAD_FORMAT, config
    )
