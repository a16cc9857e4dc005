"""What the bundle, the flags and a model's files alone can refuse, before torch or a library of models loads."""

from __future__ import annotations

from kvcq.artifacts.bundle import Bundle
from kvcq.errors import InputError, UnsupportedError
from kvcq.kernels.select import MAX_GROUP
from kvcq.models.source import resolve_source
from kvcq.pipeline.sglang.arguments import Given, build_command
from kvcq.pipeline.sglang.machine import Gpu
from kvcq.pipeline.sglang.memory import plan_memory
from kvcq.pipeline.sglang.request import SglangRequest
from kvcq.pipeline.sglang.stated import check_stated, stated_facts, weight_bytes
from kvcq.runtime.sglang.flags import parse
from kvcq.runtime.sglang.refusals import of_model, refusals, refuse
from kvcq.runtime.sglang.versions import INSTEAD
from kvcq.spec.geometry import ModelGeometry

# That of `kvcq.kernels.arrays`, which loads torch; the tests hold them equal.
MAX_HEAD_DIM = 256


def check_early(request: SglangRequest, given: Given, bundle: Bundle, gpu: Gpu) -> None:
    """Refuse everything that needs no library to be seen.

    Args:
        request: What to serve.
        given: What the user adds.
        bundle: What is served.
        gpu: The smallest of those that will be used.

    Raises:
        InputError: no such model, a context that it does not have, or a share of the memory that is none.
        UnsupportedError: a flag, heads, layers or a kind of model that are not served, or a context shorter than the
            canary.
        MismatchError: a folder that states another model, or ranks that cannot share the heads.
        ResourceError: nothing fits beside exact rows and weights.
    """
    manifest = bundle.manifest
    command = build_command(request, given, request.model, request.port, {})
    flags = parse(command[3:])
    refuse(refusals(flags, None, geometry=manifest.geometry, plan=manifest.plan))
    check_kernels(manifest.geometry)
    check_context(request, bundle)
    source = resolve_source(request.model, request.revision)
    check_stated(source, given.overrides, bundle)
    if (facts := stated_facts(source, given.overrides)) is not None:
        refuse(of_model(flags, facts))
    plan_memory(bundle, given, request.max_running, gpu, weight_bytes(source), request.sink_entries)


def check_kernels(geometry: ModelGeometry) -> None:
    """Refuse heads that no kernel has: a server would find out once its weights are loaded.

    Raises:
        UnsupportedError: names the layer.
    """
    for layer in geometry.quantizable():
        group, dims = layer.q_heads // layer.kv_heads, (layer.d_k, layer.d_v)
        reason = None
        if group > MAX_GROUP:
            reason = f"{group} query heads a KV head, kernels have 1 to {MAX_GROUP}"
        elif any(d % 16 or d > MAX_HEAD_DIM for d in dims):
            reason = f"head dims {dims[0]} and {dims[1]}, kernels have multiples of 16 up to {MAX_HEAD_DIM}"
        if reason is not None:
            raise UnsupportedError(reason, where=f"layer {layer.layer}", fix=f"fit another model, {INSTEAD}")


def check_context(request: SglangRequest, bundle: Bundle) -> None:
    """Refuse a context that the model does not have, by the bundle's account of it, or that holds no canary.

    Raises:
        InputError: longer than the model's.
        UnsupportedError: shorter than the canary.
    """
    longest, least = bundle.manifest.geometry.max_positions, bundle.canary["tokens"].shape[1] + 1
    context = request.max_context or longest
    if request.max_context is not None and longest is not None and request.max_context > longest:
        raise InputError(
            f"the model's context is {longest} tokens, not {request.max_context}",
            where="--max-context",
            fix="use a shorter one",
        )
    if context is not None and context < least:
        raise UnsupportedError(
            f"a context of {context} tokens: the canary alone has {least}",
            where="--max-context",
            fix="use a longer one",
        )
