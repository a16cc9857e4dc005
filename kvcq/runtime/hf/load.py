"""`load_cache`: a bundle and a model, and out comes a cache."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from kvcq.artifacts.bundle import Bundle, open_bundle
from kvcq.errors import InputError
from kvcq.models.load import LoadedModel, wrap_model
from kvcq.runtime.codecs import served_codecs
from kvcq.runtime.compat import Sealed, check_frame, check_model
from kvcq.runtime.hf.cache import Host, Mode, QuantizedCache
from kvcq.runtime.hf.semantics import Semantics


def load_cache(
    bundle: str | Path | Bundle,
    model: PreTrainedModel | LoadedModel,
    *,
    tokenizer: Any | None = None,
    mode: Mode = "packed",
    semantics: Semantics | None = None,
    strict: bool = False,
    kernels: bool | None = None,
) -> QuantizedCache:
    """Return an empty cache of a bundle for a model; pass it to ``model.generate(past_key_values=cache)``.

    The model's attention function is kvcq's from here on until ``cache.close()``, or until the cache is collected;
    other caches go on as before meanwhile. More caches of the same bundle: ``cache.host.new_cache()``.

    Args:
        bundle: Path of a bundle, or one already opened.
        model: A causal language model in eval mode; its device is where the cache lies.
        tokenizer: The model's tokenizer, to compare vocabularies; without it they are not compared.
        mode: ``packed``: true memory; ``simulate``: fake quantization, for comparison.
        semantics: What prefill queries read exactly; None: the window rule for every query.
        strict: Refuse other weights or another revision than the bundle was fitted on.
        kernels: Whether kernels read a packed cache: None where they can, which is on CUDA in bfloat16 and float16;
            ``cache.kernels`` says what was chosen and why. False: torch everywhere; True: kernels, or an error.

    Raises:
        CorruptArtifactError: the bundle is damaged.
        InputError: not a bundle, not a model, or not semantics.
        MismatchError: the bundle was fitted for another model.
        UnsupportedError: the model's attention cannot be observed, or `kernels` and there are none.
    """
    host = open_host(bundle, model, tokenizer=tokenizer, mode=mode, strict=strict, kernels=kernels)
    return host.new_cache(semantics)


def open_host(
    bundle: str | Path | Bundle,
    model: PreTrainedModel | LoadedModel,
    *,
    tokenizer: Any | None = None,
    mode: Mode = "packed",
    strict: bool = False,
    kernels: bool | None = None,
) -> Host:
    """Attach a bundle to a model and return what makes its caches; arguments and errors as in `load_cache`.

    A difference in provenance is a Python warning.
    """
    if not isinstance(model, PreTrainedModel | LoadedModel):
        raise InputError(
            f"{type(model).__name__} is no model", where="model", fix="load it first, e.g. with from_pretrained"
        )
    name = Path(bundle).name if isinstance(bundle, str | Path) else "bundle"
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(Path(bundle))
    loaded = model if isinstance(model, LoadedModel) else wrap_model(model, tokenizer, model.name_or_path)
    manifest = opened.manifest
    sealed = Sealed(name, manifest.identity, manifest.provenance, manifest.geometry)
    for line in check_model(sealed, loaded, strict=strict):
        warnings.warn(f"{name}: {line}", stacklevel=2)
    check_frame(sealed, loaded.geometry)
    codecs = served_codecs(manifest.plan, manifest.geometry, opened.tensors, loaded.device)
    return Host(loaded.model, codecs, manifest.geometry, manifest.recipe.windows, mode=mode, kernels=kernels)
