"""Codecs, hosts and an independent one-pass reference for the tests of the quantized cache."""

from __future__ import annotations

import inspect

import torch
from transformers import GenerationMixin

from kvcq.codecs.pair import HeadCodec
from kvcq.codecs.windows import oldest_by_query
from kvcq.evaluation.simulate import simulated_attention
from kvcq.models.attention import attention_hook, plain_attention
from kvcq.models.geometry import plan_geometry
from kvcq.models.library import forward
from kvcq.runtime.hf.cache import Host
from kvcq.spec.codec import VQ_GROUP, VQ_WORDS, CodecSpec
from kvcq.spec.plan import LayerPlan, Windows
from tests.tiny import tiny_model

# The keyword of a cache: renamed in transformers 5.24.
CACHE = "cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else None
CACHE = CACHE or "past_key_values"
WINDOWS = Windows(sink=3, recent=8)
INT2 = CodecSpec(transform="orthogonal", centred=True, clip=0.96)
GROUPED = CodecSpec(transform="orthogonal", centred=True, groups=4)
VQ = CodecSpec(transform="metric", centred=True, quantizer="group_vq", codebook="int8")
LOSSLESS = (
    CodecSpec(transform="metric", centred=True, quantizer="none"),
    CodecSpec(transform="orthogonal", centred=True, quantizer="none"),
)
PAIRS = {"int2": (INT2, INT2), "grouped keys": (GROUPED, INT2), "grouped values": (INT2, GROUPED), "vq": (VQ, INT2)}


def random_tensors(geometry, k, v, *, offset=1.0, seed=0):
    """All roles that a codec may read, at random: transforms, offsets of norm ~ offset sqrt(d), codebooks."""
    generator = torch.Generator().manual_seed(seed + 97 * geometry.layer)
    heads = geometry.kv_heads

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {}
    for side, spec, d in (("k", k, geometry.d_k), ("v", v, geometry.d_v)):
        turn = torch.linalg.qr(draw(heads, d, d))[0]
        if spec.transform == "metric":
            stretch = torch.linspace(0.5, 2.0, d, dtype=torch.float64)
            turn = turn * stretch @ torch.linalg.qr(draw(heads, d, d))[0]
            tensors[f"{side}.query"] = torch.linalg.inv(turn).mT
        tensors[f"{side}.transform"] = turn
        tensors[f"{side}.offset"] = offset * draw(heads, d).float()
        words = (40 * draw(heads, d // VQ_GROUP, VQ_WORDS, VQ_GROUP)).round().clamp(-127, 127)
        # A snapped codebook uses its whole range.
        words[..., 0, 0] = 127
        tensors[f"{side}.codebook"] = words.to(torch.int8)
        tensors[f"{side}.codebook_scale"] = torch.full((heads, d // VQ_GROUP), 0.03)
    return tensors


def codec_of(geometry, k=INT2, v=INT2, *, cast=None, device="cpu", **options):
    """A random codec of one layer; keys keep their exact form in float32 or float64 unless `cast` says otherwise."""
    tensors = random_tensors(geometry, k, v, **options)
    return HeadCodec.build(LayerPlan(layer=geometry.layer, k=k, v=v), geometry, tensors, cast=cast, device=device)


def codecs_of(model, k=INT2, v=INT2, *, only=None, **options):
    """Codecs of all full-attention layers of a model, or of those in `only`."""
    layers = plan_geometry(model).quantizable()
    return {g.layer: codec_of(g, k, v, **options) for g in layers if only is None or g.layer in only}


def host_of(model, k=INT2, v=INT2, *, windows=WINDOWS, mode="packed", kernels=None, **options):
    codecs = codecs_of(model, k, v, **options)
    return Host(model, codecs, plan_geometry(model), windows, mode=mode, kernels=kernels)


def double(model_type="llama", **overrides):
    """A tiny model in float64: what its cache computes does not depend on the shape of a product."""
    model = tiny_model(model_type, **overrides).double()
    if hasattr(model, "set_experts_implementation"):
        # The grouped product of experts has no float64.
        model.set_experts_implementation("eager")
    return model


def run(model, cache, tokens, chunks=None, **options):
    """Logits [B, T, vocab] of tokens [B, T] or [T], forwarded in pieces of `chunks` tokens (a number or a list)."""
    tokens = tokens if tokens.ndim == 2 else tokens[None]
    sizes = tokens.shape[1] if chunks is None else chunks
    return torch.cat([forward(model, part, cache=cache) for part in tokens.split(sizes, 1)], 1)


def batch_forward(model, cache, tokens, mask):
    """Logits of tokens [B, t] behind what the cache holds; mask [B, all slots], 0 for padding."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    with torch.no_grad():
        return model(tokens, attention_mask=mask, position_ids=positions, **{CACHE: cache}).logits


def one_pass(model, codecs, tokens, exact):
    """Logits of one forward without a cache whose attention reads keys as the bool mask `exact` [T, T] says."""

    source = {g.layer: g.layer if g.source is None else g.source for g in plan_geometry(model).layers}

    def attend(call):
        if source[call.layer] not in codecs:
            return plain_attention(call)
        visible = call.visible()[0, 0]
        return simulated_attention(
            call.query[0],
            call.key[0],
            call.value[0],
            codecs[source[call.layer]],
            exact,
            visible,
            scaling=call.scaling,
            softcap=call.softcap,
            sinks=call.sinks,
        )[None]

    with attention_hook(model, attend):
        return forward(model, tokens[None])


def window_mask(n, windows=WINDOWS, oldest=None):
    """The exact mask [n, n] by the window rule, or of given bounds."""
    keys = torch.arange(n)
    oldest = oldest_by_query(0, n, windows) if oldest is None else oldest
    return (keys < windows.sink) | (keys >= oldest[:, None])


def relative(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
