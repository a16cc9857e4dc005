"""Load a model with its tokenizer, geometry and identity, ready to be measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvcq.errors import InputError, UnavailableError
from kvcq.models.builtin import BUILTINS, builtin_folder
from kvcq.models.failures import loading
from kvcq.models.geometry import plan_geometry, refuse_by_config
from kvcq.models.gguf import gguf_folder
from kvcq.models.identity import build_identity, build_provenance
from kvcq.models.library import input_device, quiet_library, refuse_incomplete, refuse_meta
from kvcq.models.source import ModelSource, resolve_source
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.identity import Identity, Provenance

Notify = Callable[[str], None]
DTYPES = ("auto", "float32", "bfloat16", "float16")
HUB_TIMEOUT_S = 10


def silent(_: str) -> None:
    """Drop a progress message."""


@dataclass
class LoadedModel:
    """A model in eval mode without gradients, and everything known about it.

    `geometry` is planned: `unrotates` is False everywhere until the capture self-check has run. `device` is where
    the inputs go; `dtype_name` is the dtype of the weights, e.g. ``bfloat16``; `longest` is the length of sequence that
    the geometry's RoPE regime is that of.
    """

    model: PreTrainedModel
    tokenizer: Any | None
    source: ModelSource
    identity: Identity
    provenance: Provenance
    geometry: ModelGeometry
    device: torch.device
    dtype_name: str
    longest: int | None = None


def load_model(
    name: str,
    *,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
    cache_dir: Path | None = None,
    need_tokenizer: bool = True,
    longest: int | None = None,
    notify: Notify = silent,
) -> LoadedModel:
    """Load a hub id, folder, GGUF file or builtin model.

    Args:
        name: See `resolve_source`.
        revision: Branch, tag or commit on the hub.
        device: ``auto`` is CUDA where present, else the CPU; otherwise a torch device.
        dtype: ``auto`` is float32 on the CPU and the checkpoint's own dtype elsewhere; else one of `DTYPES`.
        device_map: Passed to accelerate to spread layers, e.g. ``auto``; excludes `device`.
        trust_remote_code: Run Python code that the model brings along.
        cache_dir: Folder for converted models; default is the user's cache folder of kvcq.
        need_tokenizer: Refuse a model without a tokenizer.
        longest: Longest sequence to be run (see `plan_geometry`).
        notify: Receives one line for each slow step.

    Raises:
        InputError: exit 2: bad arguments, unreadable or incomplete files, no tokenizer.
        UnsupportedError: exit 2: an architecture that kvcq refuses, or code that it would have to trust.
        ResourceError: exit 6: memory or disk.
        UnavailableError: exit 7: offline, gated, no such device.
    """
    source = resolve_source(name, revision)
    place = _device(device, device_map)
    wanted = _dtype(dtype, place if device_map is None else None)
    location = model_location(source, cache_dir, notify)
    local = source.kind != "hub"
    options = {"revision": source.revision, "trust_remote_code": trust_remote_code, "local_files_only": local}
    with loading(source.label), quiet_library(), torch.no_grad():
        if not local:
            reach_hub(source)
        notify(f"loading {source.label}")
        # Before the weights: some of the refused models are the largest there are.
        refuse_by_config(AutoConfig.from_pretrained(location, **options))
        tokenizer = read_tokenizer(location, source, options, need_tokenizer)
        model, report = AutoModelForCausalLM.from_pretrained(
            location, dtype=wanted, device_map=device_map, use_safetensors=True, output_loading_info=True, **options
        )
        refuse_incomplete(report, source.label)
        if device_map is None:
            model.to(place)
        if not type(model).__module__.startswith("transformers."):
            notify(f"{source.label} runs its own code: {type(model).__name__}")
    folder = Path(location) if local else _snapshot(location, model)
    revision = _revision(source, model)
    return _loaded(model, tokenizer, source, build_provenance(source.label, revision, folder), longest)


def load_tokenizer(
    name: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    cache_dir: Path | None = None,
    notify: Notify = silent,
) -> Any:
    """Load the tokenizer of a model without its weights; arguments and errors as in `load_model`."""
    source = resolve_source(name, revision)
    location = model_location(source, cache_dir, notify)
    local = source.kind != "hub"
    options = {"revision": source.revision, "trust_remote_code": trust_remote_code, "local_files_only": local}
    with loading(source.label), quiet_library():
        if not local:
            reach_hub(source)
        return read_tokenizer(location, source, options, needed=True)


def wrap_model(
    model: PreTrainedModel, tokenizer: Any | None = None, label: str = "in-memory", *, longest: int | None = None
) -> LoadedModel:
    """Wrap a model that is already in memory, put into eval mode without gradients.

    A `label` that is a local folder is read for the provenance of the weights; its last component is the source.

    Raises:
        UnsupportedError: an architecture that kvcq refuses.
    """
    folder = Path(label) if label and Path(label).is_dir() else None
    provenance = build_provenance(Path(label).name or "in-memory", folder=folder)
    return _loaded(model, tokenizer, ModelSource("folder", label), provenance, longest)


def default_cache_dir() -> Path:
    """Return the folder for downloaded and converted models."""
    return platformdirs.user_cache_path("kvcq")


def _loaded(
    model: PreTrainedModel, tokenizer: Any | None, source: ModelSource, provenance: Provenance, longest: int | None
) -> LoadedModel:
    model.eval().requires_grad_(False)
    refuse_meta(model, source.label)
    with loading(source.label):
        geometry = plan_geometry(model, longest=longest)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        source=source,
        identity=build_identity(model, tokenizer, geometry),
        provenance=provenance,
        geometry=geometry,
        device=input_device(model),
        dtype_name=str(model.dtype).removeprefix("torch."),
        longest=longest,
    )


def _device(device: str, device_map: str | None) -> torch.device:
    if device_map is not None and device != "auto":
        raise InputError("a device and a device map exclude each other", where="--device", fix="give one of them")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise InputError(f"unknown device {device!r}", where="--device", fix="auto, cpu, cuda or cuda:N") from None
    if place.type == "cuda" and not (place.index or 0) < torch.cuda.device_count():
        raise UnavailableError(f"no CUDA device {device!r} here", where="--device", fix="use --device cpu")
    return place


def _dtype(dtype: str, place: torch.device | None) -> torch.dtype | str:
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}", where="--dtype", fix=f"one of {', '.join(DTYPES)}")
    if dtype == "auto":
        on_cpu = place.type == "cpu" if place is not None else not torch.cuda.is_available()
        return torch.float32 if on_cpu else "auto"
    return getattr(torch, dtype)


def model_location(source: ModelSource, cache_dir: Path | None, notify: Notify) -> str:
    """Return what `from_pretrained` loads: a hub id, or a folder that holds a configuration."""
    cache = cache_dir or default_cache_dir()
    if source.kind == "builtin":
        return str(builtin_folder(source.location, cache, notify))
    if source.kind == "gguf":
        return str(gguf_folder(Path(source.location), cache, notify))
    if source.kind == "folder" and not (Path(source.location) / "config.json").is_file():
        fix = None
        if any(Path(source.location).glob("*.gguf")):
            fix = "give the .gguf file itself"
        elif (Path(source.location) / "adapter_config.json").is_file():
            fix = "merge the adapter into its base model first"
        raise InputError("no config.json in the model folder", where=source.label, fix=fix)
    return source.location


def reach_hub(source: ModelSource) -> None:
    """Ask the hub once, with a short timeout, before the library's own long retries; cached models need no hub."""
    if not isinstance(try_to_load_from_cache(source.location, "config.json", revision=source.revision), str):
        HfApi().model_info(source.location, revision=source.revision, timeout=HUB_TIMEOUT_S)


def read_tokenizer(location: str, source: ModelSource, options: dict[str, Any], needed: bool) -> Any | None:
    """Return the tokenizer of a model, or None where a local one has none and none is needed."""
    try:
        return AutoTokenizer.from_pretrained(location, **options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if source.kind == "hub" or "trust_remote_code" in str(error):
            raise
        if needed:
            raise InputError(
                "the model has no readable tokenizer", where=source.label, fix="add tokenizer.json to the folder"
            ) from error
        return None


def _snapshot(location: str, model: PreTrainedModel) -> Path | None:
    commit = getattr(model.config, "_commit_hash", None)
    config = try_to_load_from_cache(location, "config.json", revision=commit)
    return Path(config).parent if isinstance(config, str) else None


def _revision(source: ModelSource, model: PreTrainedModel) -> str | None:
    if source.kind == "builtin":
        return BUILTINS[source.location].requirement
    return getattr(model.config, "_commit_hash", None) if source.kind == "hub" else None
