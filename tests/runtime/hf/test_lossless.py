import pytest

from kvcq.models.library import forward, new_cache
from kvcq.spec.plan import Windows
from tests.library import dispatched_by_name
from tests.runtime.hf.setup import LOSSLESS, host_of, relative, run
from tests.tiny import tiny_model, tiny_tokens

# Biases, softcap, sinks, an own scale, shared layers, linear and sliding layers beside full ones, NoPE, d_k != d_v.
FAMILIES = [
    "llama",
    "qwen2",
    "gemma2",
    "gpt_oss",
    "granite",
    "gemma3n_text",
    "qwen3_next",
    "gemma3_text",
    "smollm3",
    "llama4_text",
    "mimo_v2_flash",
]
CHUNKS = (None, 7, 1, [16, 1, 1, 17, 5])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lossless_cache_gives_the_logits_of_the_model(family):
    model, tokens = tiny_model(family), tiny_tokens(40)
    # The fused attention of older versions drops the softcap.
    model.set_attn_implementation("eager")
    wanted = run(model, new_cache(model), tokens)
    with dispatched_by_name(), host_of(model, *LOSSLESS, mode="simulate", offset=3.0) as host:
        for chunks in CHUNKS:
            assert relative(run(model, host.new_cache(), tokens, chunks), wanted) < 1e-4, chunks
    assert relative(forward(model, tokens[None]), wanted) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_cache_whose_window_holds_everything_is_lossless(family):
    model, tokens = tiny_model(family), tiny_tokens(40)
    # The fused attention of older versions drops the softcap.
    model.set_attn_implementation("eager")
    wanted = run(model, new_cache(model), tokens)
    with dispatched_by_name(), host_of(model, windows=Windows(sink=2, recent=40), offset=3.0) as host:
        for chunks in CHUNKS:
            assert relative(run(model, host.new_cache(), tokens, chunks), wanted) < 1e-4, chunks
