"""The model of ``kvcq serve --engine sglang``, compared with the bundle before its weights are loaded."""

from __future__ import annotations

import torch

from kvcq.artifacts.bundle import Bundle
from kvcq.models.outline import Outline, load_outline
from kvcq.pipeline.progress import Reporter
from kvcq.pipeline.sglang.arguments import Given
from kvcq.pipeline.sglang.request import SglangRequest
from kvcq.runtime.compat import Sealed, check_model
from kvcq.runtime.sglang.layers import layer_tables


def open_outline(request: SglangRequest, given: Given, bundle: Bundle, reporter: Reporter) -> Outline:
    """Read configuration, tokenizer and heads of the weight files, and compare them with the bundle.

    Constants of all layers are built too, as a server builds them once its weights are loaded.

    Raises:
        InputError: no such model.
        UnsupportedError: a model that kvcq refuses, or a layer without kernels.
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
    manifest, cpu = bundle.manifest, torch.device("cpu")
    layer_tables(manifest.plan, manifest.geometry, bundle.tensors, tp=1, rank=0, dtype=torch.bfloat16, device=cpu)
    return outline


def _check(request: SglangRequest, bundle: Bundle, outline: Outline, reporter: Reporter) -> None:
    """Refuse another model, and warn of what is known to cost accuracy."""
    manifest = bundle.manifest
    sealed = Sealed(request.bundle.name, manifest.identity, manifest.provenance, manifest.geometry)
    for line in check_model(sealed, outline, strict=request.strict):
        reporter.warn(line)
    context = request.max_context or outline.geometry.max_positions
    if context is not None and manifest.target_context < context:
        reporter.warn(
            f"fitted for contexts up to {manifest.target_context} tokens, serving up to {context}: accuracy beyond is "
            "not what was measured"
        )
    if request.host not in ("127.0.0.1", "localhost", "::1"):
        reporter.warn(f"{request.host}: whoever reaches this address can use the server, unless -- --api-key is given")
