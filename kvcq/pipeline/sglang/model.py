"""The model of ``kvcq serve --engine sglang``, compared with the bundle before its weights are loaded."""

from __future__ import annotations

from kvcq.artifacts.bundle import Bundle
from kvcq.errors import InputError, UnsupportedError
from kvcq.evaluation.canary import canary_length
from kvcq.kernels.arrays import MAX_HEAD_DIM
from kvcq.kernels.select import MAX_GROUP
from kvcq.models.outline import Outline, load_outline
from kvcq.pipeline.progress import Reporter
from kvcq.pipeline.sglang.arguments import Given
from kvcq.pipeline.sglang.request import SglangRequest
from kvcq.runtime.compat import Sealed, check_model
from kvcq.runtime.sglang.versions import INSTEAD
from kvcq.spec.geometry import ModelGeometry


def open_outline(request: SglangRequest, given: Given, bundle: Bundle, reporter: Reporter) -> Outline:
    """Read configuration, tokenizer and heads of the weight files, and compare them with the bundle.

    Raises:
        InputError: no such model, or a context that it does not have.
        UnsupportedError: a model that kvcq refuses or kernels do not have, or a context shorter than the canary.
        MismatchError: another model.
        UnavailableError: offline, gated.
    """
    outline = load_outline(
        request.model,
        bundle.manifest.geometry,
        revision=request.revision,
        trust_remote_code=request.trust_remote_code,
        overrides=given.overrides,
        notify=reporter.note,
    )
    _check(request, bundle, outline, reporter)
    check_kernels(bundle.manifest.geometry)
    return outline


def check_kernels(geometry: ModelGeometry) -> None:
    """Refuse heads that no kernel has: a server would find out once its weights are loaded.

    Raises:
        UnsupportedError: names the layer.
    """
    for layer in geometry.layers:
        group, dims = layer.q_heads // layer.kv_heads, (layer.d_k, layer.d_v)
        reason = None
        if group > MAX_GROUP:
            reason = f"{group} query heads a KV head, kernels have 1 to {MAX_GROUP}"
        elif any(d % 16 or d > MAX_HEAD_DIM for d in dims):
            reason = f"head dims {dims[0]} and {dims[1]}, kernels have multiples of 16 up to {MAX_HEAD_DIM}"
        if reason is not None:
            raise UnsupportedError(reason, where=f"layer {layer.layer}", fix=f"fit another model, {INSTEAD}")


def _check(request: SglangRequest, bundle: Bundle, outline: Outline, reporter: Reporter) -> None:
    """Refuse another model, and warn of what is known to cost accuracy."""
    manifest = bundle.manifest
    sealed = Sealed(request.bundle.name, manifest.identity, manifest.provenance, manifest.geometry)
    for line in check_model(sealed, outline, strict=request.strict):
        reporter.warn(line)
    least = canary_length(manifest.recipe.windows) + 1
    longest = outline.geometry.max_positions
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
    if context is not None and manifest.target_context < context:
        reporter.warn(
            f"fitted for contexts up to {manifest.target_context} tokens, serving up to {context}: accuracy beyond is "
            "not what was measured"
        )
    if request.host not in ("127.0.0.1", "localhost", "::1"):
        reporter.warn(f"{request.host}: whoever reaches this address can use the server, unless -- --api-key is given")
