"""The geometry of a model: read from a short run, cross-checked with its configuration, or refused in one line."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvcq.errors import UnsupportedError
from kvcq.models.attention import AttentionCall
from kvcq.models.library import decoder_config
from kvcq.models.observe import Observation, observe
from kvcq.models.rope import rope_specs
from kvcq.spec.geometry import LayerGeometry, LayerKind, ModelGeometry

# Layer types of the library that call attention; every other name is recurrent, convolutional or an MLP.
ATTENTION_KINDS: dict[str, LayerKind] = {
    "full_attention": "full",
    "hybrid": "full",
    "sliding_attention": "sliding",
    "hybrid_sliding": "sliding",
    "chunked_attention": "chunked",
}
# Fields that may state the number of KV heads or the head dimension of a full layer.
KV_HEAD_FIELDS = ("num_key_value_heads", "num_global_key_value_heads")
HEAD_DIM_FIELDS = ("head_dim", "global_head_dim")


def plan_geometry(model: PreTrainedModel, *, longest: int | None = None) -> ModelGeometry:
    """Return the geometry of a model in its real layer ids, with `unrotates` False everywhere.

    Two forwards of 17 random tokens show heads, dimensions, scaling, softcap, sinks, windows and rotations; the
    configuration names the kinds of the layers and must not contradict. A layer with any sliding window counts as
    sliding, also where the window is longer than the model's context; a chunked layer's window is its chunk.

    Args:
        model: A causal language model in eval mode.
        longest: Longest sequence to be run; selects the branch of length-dependent RoPE types.

    Raises:
        UnsupportedError: latent (MLA) or indexed attention, own attention code, layers that bypass or repeat the
            call, encoder-decoders; the line names model_type, layer and reason.
    """
    refuse_by_config(model.config)
    config = decoder_config(model)
    observation = observe(model, longest)
    ropes, rope_of = rope_specs(model, observation=observation)
    producers = _producers(observation)
    layers = []
    for layer, kind in enumerate(_kinds(config)):
        calls = observation.calls.get(layer, [])
        if kind == "linear" and not calls:
            layers.append(LayerGeometry(layer=layer, kind="linear", q_heads=0, kv_heads=0, d_k=0, d_v=0))
            continue
        call = _only_call(model, layer, calls)
        actual: LayerKind = "sliding" if kind in ("full", "linear") and call.window is not None else kind
        if actual == "full":
            _cross_check(model, config, call)
        source = producers.get(layer)
        geometry = _layer(call, "full" if actual == "linear" else actual, rope_of[layer])
        if actual == "chunked":
            geometry = geometry.model_copy(update={"window": getattr(config, "attention_chunk_size", None)})
        layers.append(geometry if source is None else geometry.model_copy(update={"kind": "shared", "source": source}))
    return ModelGeometry(
        model_type=model.config.model_type,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=getattr(config, "max_position_embeddings", None),
        ropes=ropes,
        layers=tuple(layers),
    )


def observed_geometry(
    planned: ModelGeometry, seen: Mapping[int, AttentionCall], unrotates: Mapping[int, bool]
) -> ModelGeometry:
    """Confirm a planned geometry by the calls of a real forward, and record which layers passed the shift check.

    Raises:
        UnsupportedError: an attention layer was not seen, or its tensors contradict the plan.
    """
    layers = []
    for layer in planned.layers:
        if layer.kind == "linear":
            layers.append(layer)
            continue
        where = f"layer {layer.layer}"
        if layer.layer not in seen:
            raise UnsupportedError("the layer does not pass through the attention function", where=where)
        now = _layer(seen[layer.layer], layer.kind, layer.rope, layer.source)
        if layer.kind == "chunked":
            now = now.model_copy(update={"window": layer.window})
        if now != layer.model_copy(update={"unrotates": False}):
            raise UnsupportedError(
                f"attention differs between two runs: {_shape(now)} now, {_shape(layer)} before", where=where
            )
        layers.append(now.model_copy(update={"unrotates": unrotates.get(layer.layer, False)}))
    return planned.model_copy(update={"layers": tuple(layers)})


def require_quantizable(geometry: ModelGeometry) -> None:
    """Refuse a model in which no layer's cache grows with the context.

    Raises:
        UnsupportedError: no full-attention layer exists; the line says what the layers are instead.
    """
    if geometry.quantizable():
        return
    kinds = sorted({layer.kind for layer in geometry.layers})
    windows = sorted({layer.window for layer in geometry.layers if layer.window is not None})
    fix = None
    if windows:
        fix = f"set sliding_window to null in config.json if the window of {windows[-1]} tokens is never reached"
    raise UnsupportedError(
        f"nothing to quantize: all layers are {', '.join(kinds)}", where=f"model_type {geometry.model_type}", fix=fix
    )


def refuse_by_config(whole: PreTrainedConfig) -> None:
    """Refuse what the configuration alone rules out, before weights are loaded and anything runs.

    Raises:
        UnsupportedError: MLA, indexed (sparse) attention, or an encoder-decoder.
    """
    config = whole.get_text_config(decoder=True)
    where = f"model_type {whole.model_type}"
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedError("MLA latent cache is not supported", where=where)
    if getattr(config, "index_topk", None):
        raise UnsupportedError("sparse attention with an index is not supported", where=where)
    if getattr(whole, "is_encoder_decoder", False):
        raise UnsupportedError("encoder-decoder models are not supported", where=where)


def _kinds(config: Any) -> Sequence[LayerKind]:
    """Return what the configuration says each layer is; without layer types all layers are full attention."""
    names = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if names is None:
        return ["full"] * config.num_hidden_layers
    return [ATTENTION_KINDS.get("full_attention" if name == "attention" else name, "linear") for name in names]


def _only_call(model: PreTrainedModel, layer: int, calls: list[AttentionCall]) -> AttentionCall:
    if len(calls) == 1:
        return calls[0]
    times = f"calls attention {len(calls)} times a forward" if calls else "does not pass through the attention function"
    raise UnsupportedError(
        f"the layer {times}: what it caches cannot be observed",
        where=f"model_type {model.config.model_type}, layer {layer}",
    )


def _producers(observation: Observation) -> dict[int, int]:
    """Map each layer that reads another layer's cache to that layer: it is handed the very same keys."""
    producers: dict[int, int] = {}
    for layer in sorted(observation.calls):
        for earlier in range(layer):
            same_shape = earlier in observation.calls and earlier not in producers
            if same_shape and _same(observation.keys(earlier), observation.keys(layer)):
                producers[layer] = earlier
    return producers


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b.to(a.device))


def _layer(call: AttentionCall, kind: LayerKind, rope: int | None, source: int | None = None) -> LayerGeometry:
    return LayerGeometry(
        layer=call.layer,
        kind=kind,
        q_heads=call.query.shape[1],
        kv_heads=call.key.shape[1],
        d_k=call.key.shape[-1],
        d_v=call.value.shape[-1],
        scaling=call.scaling,
        softcap=call.softcap,
        sinks=call.sinks is not None,
        window=call.window,
        rope=rope,
        source=source,
    )


def _cross_check(model: PreTrainedModel, config: Any, call: AttentionCall) -> None:
    for what, fields, actual in (
        ("KV heads", KV_HEAD_FIELDS, call.key.shape[1]),
        ("channels a head", HEAD_DIM_FIELDS, call.key.shape[-1]),
    ):
        stated = {value for name in fields if isinstance(value := _field(config, name), int)}
        if stated and actual not in stated:
            raise UnsupportedError(
                f"attention receives {actual} {what}, the configuration says {' or '.join(map(str, sorted(stated)))}",
                where=f"model_type {model.config.model_type}, layer {call.layer}",
            )


def _field(config: Any, name: str) -> Any:
    """Read a field that the configuration class declares; a stray one in config.json is ignored by the model too."""
    if name not in inspect.signature(type(config)).parameters:
        return None
    try:
        return getattr(config, name, None)
    except Exception:  # types with several head dimensions raise when asked for the one
        return None


def _shape(layer: LayerGeometry) -> str:
    return f"{layer.q_heads}/{layer.kv_heads} heads of {layer.d_k}/{layer.d_v}"
