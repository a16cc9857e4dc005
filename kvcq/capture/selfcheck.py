"""Proof, on a few real tokens, that what capture sees is what the model computes, caches and rotates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcq.errors import InputError, UnsupportedError
from kvcq.models.attention import AttentionCall, attention_hook, plain_attention
from kvcq.models.geometry import observed_geometry
from kvcq.models.library import decoder_config, forward, new_cache, quiet_library
from kvcq.models.observe import SHIFT, SHORTEST
from kvcq.spec.geometry import LayerGeometry, ModelGeometry
from kvcq.stats.rotary import rotate

if TYPE_CHECKING:
    from kvcq.models.load import LoadedModel

# Random weights lose half the variance of their logits against guessing: 0.5 nats, up to 2.3 in the library's types.
DOUBTFUL_NATS, BROKEN_NATS = 1.0, 2.5
# Largest difference relative to the largest value: of logits and layer outputs, and of shifted keys and queries.
# Half precision rounds the attention weights (eager) and the cosines (bf16: 2^-9) before they are used.
LOGIT_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
SHIFT_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass
class _Run:
    """One forward: logits [T, vocab], outputs of the decoder layers, attention calls and their results, the cache."""

    logits: Tensor
    outputs: dict[int, Tensor] = field(default_factory=dict)
    calls: dict[int, list[AttentionCall]] = field(default_factory=dict)
    attended: dict[int, Tensor] = field(default_factory=dict)
    cache: Any = None


def self_check(
    loaded: LoadedModel, tokens: Tensor, *, warn: Callable[[str], None] = lambda line: None
) -> ModelGeometry:
    """Check a model before it is collected and return its geometry as observed.

    Every check compares with the untouched model: logits with its eager attention, captured keys and values bit for
    bit with its cache, keys and queries with those of the same tokens 37 positions later and, in length, at the end of
    its context. A layer that fails only the check of positions keeps ``unrotates=False``.

    Args:
        loaded: The model; left as found.
        tokens: About 48 real token ids, LongTensor ``[n]``, from the start of a text.
        warn: Receives a line when the loss on the tokens is doubtful.

    Raises:
        UnsupportedError: a check failed; one line names model_type, layer and check.
        InputError: the loss on the tokens is far above guessing.
    """
    model, dtype = loaded.model, loaded.model.dtype
    where = f"model_type {loaded.geometry.model_type}"
    limit = getattr(decoder_config(model), "max_position_embeddings", None)
    if limit:
        tokens = tokens[: max(limit - SHIFT, 2)]
    ids = tokens.long().unsqueeze(0)
    with torch.no_grad(), quiet_library():
        with _eager(model):
            eager = _run(model, ids)
        own = _run(model, ids, capture=True)
        _same_results(eager, own, LOGIT_TOLERANCE.get(dtype, 1e-1), where)
        for layer in loaded.geometry.quantizable():
            _called_once(own, layer, where)
            _equals_cache(own, layer, where)
        unrotates = _shift_check(loaded, ids, own, SHIFT_TOLERANCE.get(dtype, 4e-2))
    _plausible(own.logits, tokens, where, warn)
    return observed_geometry(loaded.geometry, {number: calls[0] for number, calls in own.calls.items()}, unrotates)


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    """Switch to the library's eager attention and back, nested configurations included."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        model.set_attn_implementation("eager")
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


def _run(
    model: Any,
    ids: Tensor,
    *,
    capture: bool = False,
    positions: Tensor | None = None,
    replay: _Run | None = None,
    past: int = 0,
) -> _Run:
    """Run once from an empty cache, which claims `past` rows: some types count positions by it."""
    run = _Run(torch.empty(0), cache=new_cache(model))
    if past:
        counted = run.cache.get_seq_length
        run.cache.get_seq_length = lambda *at, **by: counted(*at, **by) + past
    handles = [
        layer.register_forward_hook(_keep_output(run.outputs, i)) for i, layer in enumerate(_decoder_layers(model))
    ]

    def attend(call: AttentionCall) -> Tensor:
        run.calls.setdefault(call.layer, []).append(call)
        run.attended[call.layer] = replay.attended[call.layer] if replay else plain_attention(call)
        return run.attended[call.layer]

    try:
        if capture:
            with attention_hook(model, attend):
                run.logits = forward(model, ids, cache=run.cache, positions=positions)[0]
        else:
            run.logits = forward(model, ids, cache=run.cache, positions=positions)[0]
    finally:
        for handle in handles:
            handle.remove()
    return run


def _decoder_layers(model: Any) -> list[torch.nn.Module]:
    """Return the longest module list of the decoder's depth, its layers; empty if there is none."""
    depth = decoder_config(model).num_hidden_layers
    lists = (m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == depth)
    return list(next(lists, torch.nn.ModuleList()))


def _keep_output(outputs: dict[int, Tensor], number: int) -> Callable[[object, object, object], None]:
    def keep(module: object, inputs: object, output: object) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            outputs[number] = first

    return keep


def _difference(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest value of b; infinite for NaN or other shapes."""
    if a.shape != b.shape:
        return math.inf
    gap = (a.float() - b.float().to(a.device)).abs().max() / b.float().abs().max().clamp_min(1e-30).to(a.device)
    return float(gap) if torch.isfinite(gap) else math.inf


def _same_results(eager: _Run, own: _Run, tolerance: float, where: str) -> None:
    if not torch.isfinite(eager.logits).all():
        raise UnsupportedError("the model's own logits are not finite", where=where, fix="load it in another dtype")
    difference = _difference(own.logits, eager.logits)
    if difference <= tolerance:
        return
    diverging = (n for n in sorted(own.outputs) if _difference(own.outputs[n], eager.outputs[n]) > tolerance)
    raise UnsupportedError(
        f"logits through the attention hook differ from the eager model's by {difference:.1e} (limit {tolerance:.0e})",
        where=f"{where}, first at layer {next(diverging, 'unknown')}",
    )


def _called_once(run: _Run, layer: LayerGeometry, where: str) -> None:
    calls = len(run.calls.get(layer.layer, []))
    if calls != 1:
        raise UnsupportedError(
            f"the layer calls the attention function {calls} times a forward instead of once",
            where=f"{where}, layer {layer.layer}",
        )


def _equals_cache(run: _Run, layer: LayerGeometry, where: str) -> None:
    call = run.calls[layer.layer][0]
    entries = getattr(run.cache, "layers", [])
    entry = entries[layer.layer] if layer.layer < len(entries) else None
    for name, captured in (("keys", call.key), ("values", call.value)):
        cached = getattr(entry, name, None)
        if cached is None or cached.shape != captured.shape or not torch.equal(cached, captured):
            raise UnsupportedError(
                f"captured {name} are not what the model caches", where=f"{where}, layer {layer.layer}"
            )


def _shift_check(loaded: LoadedModel, ids: Tensor, own: _Run, tolerance: float) -> dict[int, bool]:
    """Tell for each layer whether k and q of the same tokens SHIFT positions later are the rotated ones.

    At the end of the model's context their length is checked, which finds scales that begin late (Llama 4, Ministral).
    """
    count, end = ids.shape[1], torch.empty(0, dtype=torch.long)
    far = max((loaded.geometry.max_positions or 0) - count, SHIFT)
    try:
        if any(rope.by_length for rope in loaded.geometry.ropes):
            # One more token, last so that no other sees it, puts the runs into the regime that will be collected.
            end = torch.tensor([max(loaded.longest or 0, SHORTEST) - 1])
            count = min(count, int(end) - SHIFT)
            far = int(end) - count
            ids = torch.cat([ids[:, :count], ids[:, :1]], dim=1)
            own = _run(loaded.model, ids, capture=True, positions=torch.cat([torch.arange(count), end]))
        # With the attention results of the first run every layer has the same input again: layers are judged one by
        # one, and rounding does not build up over a deep model in half precision.
        later, last = (
            _run(loaded.model, ids, capture=True, positions=torch.cat([place, end]), replay=own, past=past)
            for place, past in ((torch.arange(count) + SHIFT, 0), (torch.arange(count) + far, far))
        )
    except UnsupportedError:
        return {}
    shift = torch.full((count,), SHIFT)
    passed = {}
    for layer in loaded.geometry.layers:
        if any(layer.layer not in run.calls for run in (own, later, last)):
            continue
        rope = loaded.geometry.rope_of(layer)
        calls = [run.calls[layer.layer][0] for run in (own, later, last)]
        passed[layer.layer] = all(
            _difference(rotate(x.float(), shift.to(x.device), rope), y) <= tolerance
            # Angles are too coarse at the far end to compare channels; a rotation keeps the length of a row anyway.
            and _difference(z.float().norm(dim=-1), x.float().norm(dim=-1)) <= tolerance
            for x, y, z in ([getattr(call, name)[0, :, :count] for call in calls] for name in ("key", "query"))
        )
    # A cache is un-rotated for all of its readers or for none.
    for layer in loaded.geometry.layers:
        if layer.source is not None and not passed.get(layer.layer, False):
            passed[layer.source] = False
    return passed


def _plausible(logits: Tensor, tokens: Tensor, where: str, warn: Callable[[str], None]) -> None:
    """Refuse a model that is surer of wrong tokens than random weights are; warn near that."""
    targets = tokens[1:].long().to(logits.device)
    loss = float(torch.nn.functional.cross_entropy(logits[:-1].float(), targets))
    guessing = math.log(logits.shape[-1])
    if not loss <= guessing + BROKEN_NATS:
        raise InputError(
            f"loss on the calibration text is {loss:.1f} nats, far above the {guessing:.1f} of guessing",
            where=where,
            fix="the tokenizer is not this model's, or its weights arrived damaged",
        )
    if loss > guessing + DOUBTFUL_NATS:
        warn(
            f"loss on the calibration text is {loss:.1f} nats, above the {guessing:.1f} of guessing: "
            "is it this model's tokenizer and language?"
        )
