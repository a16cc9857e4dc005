"""Numbers, flags and graphs: what a model states against what its bundle holds, and which graphs a server chose."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvcq.errors import UnsupportedError
from kvcq.runtime.sglang.facts import model_facts
from kvcq.runtime.sglang.frequencies import KINDS
from kvcq.runtime.sglang.refusals import refusals
from kvcq.spec.geometry import RopeSpec
from kvcq.spec.identity import Identity
from tests.runtime.sglang.stated import ARGS, CONFIG, MODEL, geometry, served, spellings


def test_other_names_of_the_same_numbers_are_read():
    old = {"model_type": "gpt2", "n_head": 4, "n_layer": 3, "n_embd": 64}
    found = model_facts(old)
    assert (found.layers, found.q_heads, found.kv_heads, found.d_k) == (3, 4, 4, 16)


@pytest.mark.parametrize("changes", [{"num_attention_heads": None}, {"num_hidden_layers": [1]}, {"hidden_size": "x"}])
def test_a_shape_that_cannot_be_read_is_refused_in_one_line(changes):
    with pytest.raises(UnsupportedError, match="the shape of its layers cannot be read") as caught:
        model_facts({**CONFIG, "head_dim": None, **changes})
    assert "\n" not in str(caught.value) and caught.value.where == "llama config.json"


@pytest.mark.parametrize(
    ("args", "kind"),
    [
        ({"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="full"))}, "full"),
        ({"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="tc_piecewise"))}, "tc_piecewise"),
        ({"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="breakable"))}, None),
        ({"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="disabled"))}, None),
        ({"disable_piecewise_cuda_graph": False}, "piecewise"),
        ({"disable_piecewise_cuda_graph": False, "enable_breakable_cuda_graph": True}, None),
        ({"disable_piecewise_cuda_graph": True}, None),
    ],
)
def test_graphs_of_prefills_are_refused_by_the_kind_that_was_chosen_in_the_end(args, kind):
    found = refusals(served(**args), MODEL)
    assert [refusal.flag for refusal in found] == ([] if kind is None else [f"CUDA graphs of prefills, kind {kind}"])


def test_every_release_says_which_graphs_of_prefills_it_chose(sources):
    fields = set(sources.fields(ARGS))
    if sources.version.startswith("0.5.13"):
        assert {"disable_piecewise_cuda_graph", "enable_breakable_cuda_graph"} <= fields
        assert "--disable-piecewise-cuda-graph" in spellings(sources)
        return
    assert {"cuda_graph_config", "cuda_graph_backend_prefill"} <= fields
    config = sources.text("sglang.srt.model_executor.cuda_graph_config")
    for name, value in (("BREAKABLE", "breakable"), ("DISABLED", "disabled"), ("FULL", "full")):
        assert f'{name} = "{value}"' in config
    text = sources.text("sglang.srt.server_args")
    assert '_set(Phase.PREFILL, "backend", self.cuda_graph_backend_prefill)' in text


def test_another_vocabulary_or_another_flag_of_norms_and_biases_is_refused():
    own = Identity(geometry="g", vocabulary="v", norms={"rms_norm_eps": 1e-6, "qk_norm": True}, biases={"bias": False})
    same = {**CONFIG, "vocab_size": 128, "rms_norm_eps": 1e-6, "bias": False, "mlp_bias": True}
    assert refusals(served(), model_facts(same), geometry=geometry(), identity=own) == ()
    found = refusals(served(), model_facts({**same, "vocab_size": 256}), geometry=geometry(), identity=own)
    assert "vocabulary of 128, the model has 256" in found[0].reason
    for name, value in (("rms_norm_eps", 1e-5), ("bias", True), ("qk_norm", False)):
        found = refusals(served(), model_facts({**same, name: value}), geometry=geometry(), identity=own)
        assert [refusal.flag for refusal in found] == [f"LlamaForCausalLM {name}"]


@pytest.mark.parametrize("name", ["factor", "rope_theta", "original_max_position_embeddings", "low_freq_factor"])
def test_numbers_of_a_scaled_rope_must_be_those_of_the_bundle(name):
    stated = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    rope = RopeSpec(rotary_dims=32, inv_freq=tuple(KINDS["llama3"](stated, 32)[0]), regime="llama3")
    same = model_facts({**CONFIG, "rope_parameters": stated})
    assert refusals(served(), same, geometry=geometry(rope=rope)) == ()
    other = model_facts({**CONFIG, "rope_parameters": {**stated, name: stated[name] * 2}})
    found = refusals(served(), other, geometry=geometry(rope=rope))
    assert [refusal.flag for refusal in found] == ["layer 0 RoPE"] and name in found[0].reason
