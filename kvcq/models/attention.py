"""The one seam into a running model: every attention call passes through a function of ours.

The library looks up attention and mask functions by name. Both are registered under one private name: with an
attention function alone it hands over no mask at all, and the model sees the future without any error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from kvcq.errors import UnsupportedError
from kvcq.models.library import quiet_library

# Keywords that the library passes along and that change nothing here: bookkeeping of the outer forward, and
# `position_ids`, which only packed flash attention reads (q and k arrive rotated).
IRRELEVANT = frozenset(
    {
        "cache_position",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
QUERY_BLOCK = 512
_names = itertools.count()


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call as the model makes it: batch first, q and k after RoPE, KV heads not repeated.

    Attributes:
        layer: Real layer id (`module.layer_idx`).
        query: [B, Hq, Tq, d_k]; query head i reads KV head i // (Hq / H).
        key: [B, H, Tk, d_k]: cached rows first, the new Tq rows last.
        value: [B, H, Tk, d_v].
        mask: bool (True = visible) or additive, broadcastable to [B, 1, Tq, Tk]; None = causal, aligned to the end.
        scaling: Factor on q . k.
        softcap: Logits become softcap * tanh(logits / softcap); None = no cap.
        sinks: Learned sink logits [Hq], part of the softmax denominator only; None = none.
        window: Sliding window that the module asked for, already contained in `mask`.
        module: The attention module that makes the call.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    window: int | None = None
    module: nn.Module | None = None

    def visible(self) -> Tensor:
        """Return which keys each query sees, bool [B or 1, 1, Tq, Tk]."""
        queries, keys = self.query.shape[2], self.key.shape[2]
        if self.mask is None:
            full = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=self.query.device)
            return full.tril(keys - queries)
        seen = self.mask if self.mask.dtype == torch.bool else self.mask > torch.finfo(self.mask.dtype).min / 2
        return seen.expand(-1, 1, queries, keys)


Hook = Callable[[AttentionCall], Tensor]


def plain_attention(call: AttentionCall) -> Tensor:
    """Compute what the untouched model computes, [B, Hq, Tq, d_v] in the dtype of the query.

    torch's fused attention where it can express the call; exact math with a float32 softmax for softcap and sinks.
    """
    if call.softcap is None and call.sinks is None:
        return _fused(call)
    return _exact(call)


def _fused(call: AttentionCall) -> Tensor:
    query, key, value, mask = call.query, call.key, call.value, call.mask
    if mask is None and 1 < query.shape[2] != key.shape[2]:
        mask = call.visible()  # torch aligns its causal flag to the start
    group = query.shape[1] // key.shape[1]
    # On CUDA, grouped heads together with a mask or a wide head fall back to a kernel that stores all scores.
    on_cuda = query.is_cuda and mask is None and key.shape[-1] == value.shape[-1] <= 256
    grouped = group > 1 and (query.device.type == "cpu" or on_cuda)
    if group > 1 and not grouped:
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and query.shape[2] > 1,
        scale=call.scaling,
        enable_gqa=grouped,
    )


def _exact(call: AttentionCall) -> Tensor:
    """Softmax over explicit scores, in blocks of queries so that memory does not grow with Tq * Tk."""
    batch, heads, queries, _ = call.query.shape
    kv_heads = call.key.shape[1]
    keys = call.key.transpose(2, 3).unsqueeze(2)
    values = call.value.unsqueeze(2)
    visible = call.visible()
    outputs = []
    for start in range(0, queries, QUERY_BLOCK):
        query = call.query[:, :, start : start + QUERY_BLOCK].unflatten(1, (kv_heads, -1))
        scores = (query @ keys).flatten(1, 2) * call.scaling
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        # Not minus infinity: a padding query sees no key at all, and its NaN would spread over later layers.
        lowest = torch.finfo(torch.float32).min
        scores = scores.float().masked_fill(~visible[:, :, start : start + QUERY_BLOCK], lowest)
        if call.sinks is not None:
            sinks = call.sinks.float().reshape(1, heads, 1, 1).expand(batch, heads, scores.shape[2], 1)
            weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)
        grouped = weights.to(call.value.dtype).unflatten(1, (kv_heads, -1))
        outputs.append((grouped @ values).flatten(1, 2))
    return torch.cat(outputs, dim=2)


@contextmanager
def attention_hook(model: nn.Module, hook: Hook) -> Iterator[None]:
    """Route every attention call of a transformers model through `hook` and restore everything on exit.

    Hooks nest: an inner one replaces the outer one for its duration. The output of `hook`, [B, Hq, Tq, d_v], is
    cast to the dtype of the query.

    Raises:
        UnsupportedError: the model does not dispatch its attention by name, or (inside a forward) a call carries
            something that kvcq does not know: a keyword, dropout, a per-head mask, a non-causal call.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(f"{type(model).__name__} is not a transformers model")
    name = f"kvcq_{next(_names)}"

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        call = _read_call(module, query, key, value, attention_mask, options)
        output = hook(call)
        return output.to(query.dtype).transpose(1, 2).contiguous(), None

    configs = list(_configs(model))
    before = [config._attn_implementation_internal for config in configs]
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, _mask)
    try:
        with quiet_library():
            model.set_attn_implementation(name)
        if any(module.config._attn_implementation != name for module in _submodels(model)):
            raise UnsupportedError(
                "attention cannot be observed: the model has its own attention code path",
                where=f"model_type {model.config.model_type}",
            )
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            # Whoever switched it meanwhile keeps what they chose.
            if config._attn_implementation_internal == name:
                config._attn_implementation_internal = implementation
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def _mask(**options: Any) -> Tensor | None:
    """Build the library's bool mask; None only where it means causal *aligned to the end*."""
    aligned = options["q_length"] in (1, options["kv_length"])
    skip = options.pop("allow_is_causal_skip", True) and aligned
    return sdpa_mask(**options, allow_is_causal_skip=skip)


def _read_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> AttentionCall:
    """Turn the library's arguments into an `AttentionCall`; whatever is not understood is refused, never dropped."""
    layer = getattr(module, "layer_idx", None)
    where = f"layer {layer}" if layer is not None else type(module).__name__

    def refuse(reason: str, fix: str | None = None) -> UnsupportedError:
        return UnsupportedError(reason, where=where, fix=fix)

    if not isinstance(layer, int):
        raise refuse("an attention module without a layer id")
    scaling, softcap = options.pop("scaling", None), options.pop("softcap", None)
    sinks, window = options.pop("s_aux", None), options.pop("sliding_window", None)
    if options.pop("dropout", 0.0):
        raise refuse("attention dropout is on", "call model.eval() first")
    causal = options.pop("is_causal", None)
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise refuse("attention is not causal")
    for keyword, argument in options.items():
        if argument is not None and keyword not in IRRELEVANT:
            raise refuse(f"attention is called with the unknown argument {keyword!r}")
    if query.shape[1] % key.shape[1]:
        raise refuse(f"{query.shape[1]} query heads do not divide over {key.shape[1]} KV heads")
    if mask is not None:
        if mask.ndim != 4 or mask.shape[1] != 1:
            raise refuse(f"an attention mask of shape {tuple(mask.shape)}: only masks shared by all heads are known")
        mask = mask if mask.shape[3] == key.shape[2] else mask[..., : key.shape[2]]
    return AttentionCall(
        layer=layer,
        query=query,
        key=key,
        value=value,
        mask=mask,
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=None if softcap is None else float(softcap),
        sinks=sinks,
        window=window,
        module=module,
    )


def _submodels(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


def _configs(model: PreTrainedModel) -> Iterator[Any]:
    """Yield every configuration object that the switch may touch, nested ones included, each once."""
    seen: set[int] = set()
    queue = [module.config for module in _submodels(model)]
    while queue:
        config = queue.pop()
        if config is None or id(config) in seen:
            continue
        seen.add(id(config))
        queue += [getattr(config, name, None) for name in config.sub_configs]
        yield config
