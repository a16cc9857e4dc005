"""The law of the shifted frame inside real attention modules: a lossless codec changes no logit."""

import pytest
import torch

from kvcq.evaluation.simulate import exact_by_query, simulated_attention
from kvcq.models.attention import attention_hook, plain_attention
from kvcq.spec.plan import Windows
from tests.evaluation.helpers import geometry, random_codec
from tests.tiny import tiny_model, tiny_tokens

TOKENS = 48


def logits(model, hook):
    with torch.no_grad(), attention_hook(model, hook):
        return model(tiny_tokens(TOKENS)[None]).logits[0]


def hook_of(quantizer: str):
    def hook(call):
        if call.window is not None:
            return plain_attention(call)
        _, kv_heads, _, d_k = call.key.shape
        shape = geometry(call.layer, call.query.shape[1], kv_heads, d_k, call.value.shape[-1])
        codec = random_codec(shape, quantizer=quantizer, transform="orthogonal", offset=3.0, seed=call.layer)
        exact = exact_by_query(TOKENS, Windows(sink=2, recent=6))
        served = simulated_attention(
            call.query[0],
            call.key[0],
            call.value[0],
            codec,
            exact,
            call.visible()[0, 0],
            scaling=call.scaling,
            softcap=call.softcap,
            sinks=call.sinks,
        )
        return served[None]

    return hook


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2", "gpt_oss", "granite"])
def test_a_lossless_cache_changes_no_logit_and_a_coded_one_does(model_type):
    model = tiny_model(model_type)
    plain = logits(model, plain_attention)
    scale = plain.abs().max()
    assert (logits(model, hook_of("none")) - plain).abs().max() < 1e-4 * scale
    assert (logits(model, hook_of("uniform")) - plain).abs().max() > 1e-3 * scale
