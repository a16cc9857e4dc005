"""Talking to transformers: silence, the decoder's configuration, and a forward that survives renamed keywords."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging

from kvcq.errors import InputError, UnsupportedError


@contextmanager
def quiet_library() -> Iterator[None]:
    """Silence the library's warnings and progress bars; kvcq reports in its own words. Restored on exit."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def refuse_incomplete(report: Mapping[str, Any], label: str) -> None:
    """Refuse a model whose files lack weights: the library fills them with random numbers and only warns.

    Args:
        report: What ``from_pretrained(output_loading_info=True)`` returned beside the model.
        label: Name of the model in the error.

    Raises:
        InputError: a weight is missing or has another shape; the line names the first.
    """
    for kind in ("missing", "mismatched"):
        names = sorted(str(name) for name in report.get(f"{kind}_keys") or ())
        if names:
            raise InputError(f"{len(names)} weights are {kind}, the first is {names[0]}", where=label)


def refuse_meta(model: PreTrainedModel, label: str) -> None:
    """Refuse weights that have no data. Offloaded ones are none of them: accelerate brings them for each forward.

    Raises:
        InputError: a parameter lies on the meta device and nothing will load it; the line names it.
    """
    offloaded = tuple(name for name, module in model.named_modules() if _offloads(getattr(module, "_hf_hook", None)))
    for name, parameter in model.named_parameters():
        if parameter.is_meta and not any(name.startswith(f"{owner}." if owner else "") for owner in offloaded):
            raise InputError(
                f"the weight {name} is on the meta device: it has no data",
                where=label,
                fix="load the model completely, or spread it with --device-map auto",
            )


def _offloads(hook: Any) -> bool:
    return any(getattr(link, "offload", False) for link in getattr(hook, "hooks", (hook,)))


def decoder_config(model: PreTrainedModel) -> Any:
    """Return the configuration that describes the text decoder (nested in multimodal models)."""
    return model.config.get_text_config(decoder=True)


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """Return an empty cache with one entry a layer; sliding layers keep their last window - 1 rows only.

    A type whose own module defines a cache class (MiniMax) takes no other.
    """
    module = type(model).__module__
    for own in list(getattr(sys.modules.get(module), "__dict__", {}).values()):
        if isinstance(own, type) and issubclass(own, DynamicCache) and own.__module__ == module:
            return own()
    return DynamicCache(config=model.config)


def input_device(model: PreTrainedModel) -> torch.device:
    """Return where token ids go: offloaded weights lie on the meta device until their module runs."""
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    return model.device if device is None else torch.device(device)


@torch.no_grad()
def forward(
    model: PreTrainedModel,
    tokens: Tensor,
    *,
    cache: DynamicCache | None = None,
    positions: Tensor | None = None,
    last_only: bool = False,
    keep: int | None = None,
) -> Tensor:
    """Run one forward and return the logits [B, T, vocab], or those of the last tokens alone.

    Args:
        model: A causal language model in eval mode.
        tokens: LongTensor [B, T], on any device.
        cache: Extended in place by T rows; None runs without a cache.
        positions: Position ids [T] or [B, T]; None counts on from the rows of the cache.
        last_only: Return the logits of the last token only.
        keep: Return those of the last `keep` tokens only. A model that can does not compute the others.

    Raises:
        UnsupportedError: `positions` is given and the model takes none.
    """
    accepted = inspect.signature(model.forward).parameters
    device = input_device(model)
    options: dict[str, Any] = {"use_cache": cache is not None}
    if cache is not None:
        # transformers renamed the keyword; the old name still works in newer versions but warns at every call.
        options["cache" if "cache" in accepted else "past_key_values"] = cache
    if positions is not None:
        if "position_ids" not in accepted:
            raise UnsupportedError("the model takes no position ids", where=f"model_type {model.config.model_type}")
        options["position_ids"] = positions.to(device).expand(tokens.shape[0], -1)
    keep = 1 if last_only else keep
    if keep is not None and "logits_to_keep" in accepted:
        options["logits_to_keep"] = keep
    logits = model(tokens.to(device), **options).logits
    return logits if keep is None else logits[:, -keep:]
