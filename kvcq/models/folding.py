"""May the value rotation be folded into the output projection? Decided per layer by running it both ways."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvcq.models.attention import AttentionCall, attention_hook, plain_attention
from kvcq.models.library import forward

FOLD_LIMIT = 1e-3
FOLDS = "folds"
PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj", "wo", "o")
REFLECTIONS = 16


@torch.no_grad()
def fold_errors(
    model: PreTrainedModel, tokens: Tensor, layers: Collection[int], seed: int = 0
) -> dict[int, tuple[float | None, str]]:
    """Measure, for each layer, what folding a value rotation into W_O does to the attention module's output.

    The module is run alone on the inputs it saw in one real forward, as a float32 copy: once as it is, once with
    its values turned by a random orthogonal matrix per KV head and the inverse folded into the projection. Every
    layer is judged alone, and the model itself is never touched.

    Args:
        model: A supported causal language model.
        tokens: LongTensor [T], a few dozen real tokens.
        layers: Real ids of the layers to judge.
        seed: Seed of the rotations.

    Returns:
        Layer -> (relative error, reason). The rotation folds if the reason is `FOLDS`, which holds for errors up to
        `FOLD_LIMIT`; gates and norms between attention and W_O give errors near 1. The error is None where no plain
        projection exists: missing, quantized or offloaded.
    """
    inputs: dict[int, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}
    modules = _attention_modules(model, tokens[None, :1], layers)
    hooks = [
        module.register_forward_pre_hook(
            lambda module, args, kwargs, layer=layer: inputs.update({layer: (module, args, kwargs)}), with_kwargs=True
        )
        for layer, module in modules.items()
    ]
    try:
        forward(model, tokens[None], last_only=True)
    finally:
        for hook in hooks:
            hook.remove()
    return {layer: _judge(model, *inputs[layer], seed=seed + layer) for layer in layers}


def fold_output(weight: Tensor, rotation: Tensor, query_heads: int) -> Tensor:
    """Return W_O' [out, Hq d_v] that undoes a value rotation: W_O'_h = W_O_h R_g for the KV head g of query head h.

    Args:
        weight: W_O [out, Hq d_v], applied as ``y = o W_O^T``. Its bias stays untouched.
        rotation: Orthogonal [H, d_v, d_v], used as ``v' = v R``.
        query_heads: Hq; query head h reads KV head h // (Hq / H).
    """
    by_head = rotation.to(weight).repeat_interleave(query_heads // rotation.shape[0], dim=0)
    return torch.einsum("ohd,hde->ohe", weight.unflatten(1, (query_heads, -1)), by_head).flatten(1)


def _attention_modules(model: PreTrainedModel, tokens: Tensor, layers: Collection[int]) -> dict[int, nn.Module]:
    found: dict[int, nn.Module] = {}

    def hook(call: AttentionCall) -> Tensor:
        if call.layer in layers and call.module is not None:
            found[call.layer] = call.module
        return plain_attention(call)

    with attention_hook(model, hook):
        forward(model, tokens, last_only=True)
    return found


def _judge(
    model: PreTrainedModel, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int
) -> tuple[float | None, str]:
    name = next((name for name in PROJECTIONS if isinstance(getattr(module, name, None), nn.Module)), None)
    if name is None:
        return None, "no output projection found"
    if type(getattr(module, name)) not in (nn.Linear, Conv1D):
        return None, f"the output projection is a {type(getattr(module, name)).__name__}, not a plain linear map"
    if any(parameter.is_meta for parameter in module.parameters()):
        return None, "the weights are offloaded"
    shared: Any = getattr(module, "config", None)  # the copy must follow the switch of the attention function
    twin = copy.deepcopy(module, {id(shared): shared}).float()
    args, kwargs = _float32(args), _float32(kwargs)
    rotations: list[Tensor] = []

    def rotate(call: AttentionCall) -> Tensor:
        heads, dims = call.value.shape[1], call.value.shape[3]
        rotations[:] = [_orthogonal(heads, dims, seed).to(call.value)]
        return plain_attention(replace(call, value=call.value @ rotations[0]))

    def run(hook: Any) -> Tensor:
        with attention_hook(model, hook):
            output = twin(*args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    exact = run(plain_attention)
    run(rotate)
    projection: Any = getattr(twin, name)
    transposed = isinstance(projection, Conv1D)
    weight = projection.weight.T if transposed else projection.weight
    dims = rotations[0].shape[-1]
    if weight.shape[1] % dims:
        return None, f"the output projection reads {weight.shape[1]} channels, not whole heads of {dims}"
    folded = fold_output(weight, rotations[0], weight.shape[1] // dims)
    projection.weight = nn.Parameter(folded.T if transposed else folded, requires_grad=False)
    error = float((run(rotate) - exact).norm() / exact.norm().clamp_min(torch.finfo(torch.float32).tiny))
    if error <= FOLD_LIMIT:
        return error, FOLDS
    return error, "something between attention and the output projection does not commute with a rotation"


def _orthogonal(heads: int, dims: int, seed: int) -> Tensor:
    """Random orthogonal matrices [heads, dims, dims], float64: products of reflections, so no decomposition."""
    generator = torch.Generator().manual_seed(seed)
    result = torch.eye(dims, dtype=torch.float64).expand(heads, dims, dims)
    for _ in range(REFLECTIONS):
        axis = torch.randn(heads, dims, 1, generator=generator, dtype=torch.float64)
        axis = axis / axis.norm(dim=1, keepdim=True)
        result = result - 2 * (result @ axis) @ axis.transpose(1, 2)
    return result


def _float32(value: Any) -> Any:
    """Cast the floating tensors of nested arguments to float32; everything else stays."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_float32(item) for item in value)
    if isinstance(value, dict):
        return {key: _float32(item) for key, item in value.items()}
    return value
