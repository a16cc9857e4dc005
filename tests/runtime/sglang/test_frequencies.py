"""Frequencies from settings, held to those of the library of models."""

import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvcq.runtime.sglang.frequencies import KINDS, differs
from kvcq.spec.geometry import RopeSpec

LENGTH = {"original_max_position_embeddings": 2048}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LENGTH}
KINDS_OF = [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, **LENGTH},
    {"rope_type": "yarn", "factor": 4.0, **LENGTH, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5},
    {"rope_type": "yarn", "factor": 40.0, **LENGTH, "mscale": 0.707, "mscale_all_dim": 1.0, "truncate": False},
]


def of_library(stated):
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=8, head_dim=64, max_position_embeddings=8192, rope_parameters=dict(stated)
    )
    values, scaling = ROPE_INIT_FUNCTIONS[stated["rope_type"]](config, device="cpu")
    return RopeSpec(
        rotary_dims=64, inv_freq=tuple(values.tolist()), attention_scaling=scaling, regime=stated["rope_type"]
    )


@pytest.mark.parametrize("kind", KINDS_OF)
def test_every_kind_has_the_frequencies_of_the_library_and_each_number_counts(kind):
    stated = {**kind, "rope_theta": 500000.0}
    rope = of_library(stated)
    assert not differs(rope, stated, 64)
    for name in {*stated} - {"rope_type", "truncate", "mscale_all_dim"}:
        assert differs(rope, {**stated, name: stated[name] * 1.5}, 64), name
    assert differs(rope, stated, 32) and differs(rope, {**stated, "partial_rotary_factor": 0.5}, 64)


def test_what_lacks_a_number_or_is_unknown_is_not_compared():
    rope = RopeSpec(rotary_dims=4, inv_freq=(1.0, 0.01))
    assert not differs(rope, {"rope_type": "default", "rope_theta": 10000.0}, 4)
    assert differs(rope, {"rope_type": "default", "rope_theta": 20000.0}, 4)
    for stated in ({"rope_type": "new", "rope_theta": 2.0}, *({"rope_type": kind} for kind in KINDS)):
        assert not differs(rope, stated, 4)
