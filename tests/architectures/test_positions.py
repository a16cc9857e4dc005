"""Positions: statistics un-rotate where the check says so, hold in one RoPE regime, stay bound where it says no."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcq.artifacts.stats_file import read_stats
from kvcq.capture.selfcheck import self_check
from kvcq.data.sequences import TokenSequence
from kvcq.errors import InputError, UnsupportedError
from kvcq.models.attention import attention_hook, plain_attention
from kvcq.models.library import forward
from kvcq.models.load import wrap_model
from kvcq.pipeline.inspect_model import describe
from kvcq.stats.accumulator import LayerSums
from kvcq.stats.rotary import average_mean, average_second, mean_rotation_moments
from tests.capture.examples import collect, everything
from tests.chain import World, write_text
from tests.library import OLDER
from tests.tiny import save_tiny, tiny_model, tiny_tokens


def longrope(original: int) -> dict[str, Any]:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": original,
    }
    return {"head_dim": 16, "rope_parameters": rope, "original_max_position_embeddings": original}


def scaled(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0} | fields}


LLAMA3 = scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = scaled("yarn", original_max_position_embeddings=64)
DYNAMIC = scaled("dynamic") | {"max_position_embeddings": 64}
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
NOPE_FIRST = {"no_rope_layers": [0, 1, 1, 1]}
SCALED_BY_POSITION = scaled("yarn", original_max_position_embeddings=128, llama_4_scaling_beta=0.1)

# Name -> (model type, fields, regime of 96 tokens). Layer 0 attends to everything in all of them.
TURNING = {
    "partial": ("phi3", PARTIAL, "default"),
    "partial, a quarter": ("stablelm", {}, "default"),
    "interleaved": ("ernie4_5", {}, "default"),
    "interleaved and partial": ("glm4", {}, "default"),
    "yarn": ("llama", YARN, "yarn"),
    "llama3": ("llama", LLAMA3, "llama3"),
    "longrope short": ("phi3", longrope(128), "longrope:short"),
    "longrope long": ("phi3", longrope(64), "longrope:long"),
    "dynamic": ("llama", DYNAMIC, "dynamic:long"),
    "no positions": ("smollm3", NOPE_FIRST, "default"),
    "norm after, without weight": ("nanochat", {}, "default"),
    "norm before": ("qwen3", {}, "default"),
}
LENGTH = 96


@cache
def checked(name: str) -> Any:
    model_type, fields, _ = TURNING[name]
    loaded = wrap_model(tiny_model(model_type, **{"num_hidden_layers": 4} | fields), longest=LENGTH)
    return loaded, self_check(loaded, tiny_tokens(48))


def repeated(token: int, length: int) -> TokenSequence:
    tokens = np.full(length, token, dtype=np.int32)
    return TokenSequence(tokens, ((0, length),), hashlib.sha256(tokens.tobytes()).hexdigest())


def moments(part: Any, geometry: Any, layer: int = 0) -> dict[str, torch.Tensor]:
    """Return the sums of one layer, float64."""
    one, prefix = geometry.layers[layer], f"layers.{layer}."
    own = {name.removeprefix(prefix): array for name, array in part.moments.items() if name.startswith(prefix)}
    sums = LayerSums.from_arrays(one, geometry.rope_of(one), own)
    return {name: exact.value() for name, exact in sums.sums.items()}


def first_layer(loaded: Any, tokens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q [Hq, T, d] and k [H, T, d] of layer 0 in one forward, float64."""
    seen: list[torch.Tensor] = []

    def hook(call: Any) -> torch.Tensor:
        if call.layer == 0:
            seen[:] = [call.query[0].double(), call.key[0].double()]
        return plain_attention(call)

    with attention_hook(loaded.model, hook):
        forward(loaded.model, torch.from_numpy(tokens.astype("int64"))[None])
    return seen[0], seen[1]


@pytest.mark.parametrize("name", TURNING)
def test_keys_and_queries_of_one_token_unrotate_to_one_row(name: str) -> None:
    """Layer 0 sees the same embedding at every position: un-rotated, all its rows are the row at position 0."""
    loaded, geometry = checked(name)
    assert all(layer.unrotates for layer in geometry.quantizable())
    assert {rope.regime for rope in geometry.ropes} == {TURNING[name][2]}
    sequence = repeated(7, LENGTH)
    part = collect(loaded, geometry, [sequence], plan=everything([sequence]))[0].result
    q, k = first_layer(loaded, sequence.tokens)
    found = moments(part, geometry)
    moved = "0" if "k0_sum" in found else ""  # a layer without rotation stores its moments once
    torch.testing.assert_close(found[f"k{moved}_sum"] / LENGTH, k[:, 0], rtol=1e-3, atol=1e-4)
    group = q[:, 0].unflatten(0, (k.shape[0], -1))
    torch.testing.assert_close(found[f"q{moved}_sum"] / LENGTH, group.sum(1), rtol=1e-3, atol=2e-4)
    outer = k[:, 0, :, None] * k[:, 0, None, :]
    torch.testing.assert_close(found[f"k{moved}_moment"] / LENGTH, outer, rtol=1e-2, atol=1e-3)


@settings(max_examples=25)
@given(name=st.sampled_from([name for name in TURNING if name != "no positions"]), data=st.data())
def test_retargeted_moments_are_those_collected_at_the_target(name: str, data: st.DataObject) -> None:
    """What was collected on a few positions gives the moments of rows at [sink, N), measured there."""
    loaded, geometry = checked(name)
    token = data.draw(st.integers(3, 127))
    sink = data.draw(st.integers(0, 40))
    # Where the length selects the frequencies, both must be of the one regime.
    short = LENGTH if geometry.ropes[0].by_length else data.draw(st.integers(8, 40))
    sequence = repeated(token, short)
    part = collect(loaded, geometry, [sequence], plan=everything([sequence]))[0].result
    found, rope = moments(part, geometry), geometry.rope_of(geometry.layers[0])
    over = mean_rotation_moments(rope, sink, LENGTH, geometry.layers[0].d_k)
    _, k = first_layer(loaded, repeated(token, LENGTH).tokens)
    rows = k[:, sink:]
    mean = average_mean(found["k0_sum"] / short, rope, over)
    second = average_second(found["k0_moment"] / short, rope, over)
    torch.testing.assert_close(mean, rows.mean(1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(second, rows.mT @ rows / rows.shape[1], rtol=1e-2, atol=2e-3)


# Name -> (model type, fields, layers whose statistics hold at the collected positions only).
BOUND = {
    "learned norm after rotation": ("hunyuan_v1_dense", {}, [0, 1, 2, 3]),
    "query scale by position": ("ministral3", SCALED_BY_POSITION, [0, 1, 2, 3]),
    "query scale by rows of the cache": ("llama4_text", {"floor_scale": 128}, [3]),
    "query scale that begins beyond the context": ("llama4_text", {"floor_scale": 8192}, []),
    "learned positions": ("gpt2", {}, [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", BOUND)
def test_layers_bound_to_their_positions_are_found_by_measuring(name: str) -> None:
    model_type, fields, bound = BOUND[name]
    loaded = wrap_model(tiny_model(model_type, **fields))
    geometry = self_check(loaded, tiny_tokens(48))
    assert [layer.layer for layer in geometry.quantizable() if not layer.unrotates] == bound
    text = describe(loaded, geometry, 512).text()
    assert ("holds at collected positions only" in text) == bool(bound)


@pytest.fixture
def world(tmp_path: Path) -> World:
    torch.set_num_threads(1)
    text, held_out = (write_text(tmp_path / f"{seed}.txt", seed, 300) for seed in (1, 2))
    return World(folder=tmp_path, model=tmp_path / "model", text=text, held_out=held_out, contexts=(96,))


def test_a_bound_layer_refuses_a_longer_target_by_name(world: World) -> None:
    save_tiny(world.model, "hunyuan_v1_dense")
    world.collect(world.stats, num_tokens=640, seq_len=64)
    world.fit(world.folder / "within", "oscar", target_context=64)
    with pytest.raises(UnsupportedError, match=r"layer 0 does not un-rotate.*--target-context.*128 tokens"):
        world.fit(world.folder / "beyond", "oscar", target_context=128)
    assert not (world.folder / "beyond").exists()


@pytest.mark.parametrize(("model_type", "fields"), [("phi3", longrope(64)), ("llama", DYNAMIC)])
def test_chunks_never_mix_regimes(model_type: str, fields: dict[str, Any]) -> None:
    """A chunk is a forward of its own length: it would rotate by other frequencies than the whole sequence."""
    if OLDER and fields is DYNAMIC:
        pytest.skip("this version of transformers never returns from stretched frequencies, so that none mix")
    loaded = wrap_model(tiny_model(model_type, **fields), longest=LENGTH)
    geometry = self_check(loaded, tiny_tokens(48))
    sequence = repeated(7, LENGTH)
    for chunk, length in ((48, LENGTH), (1000, 50)):
        other = repeated(7, length)
        with pytest.raises(InputError, match=r"other rotary frequencies than \w+:long .*--chunk"):
            collect(loaded, geometry, [other], plan=everything([other]), chunk=chunk)
    assert collect(loaded, geometry, [sequence], plan=everything([sequence]))[0].result.tokens == LENGTH


def test_collect_refuses_what_would_mix_and_leaves_short_sequences_out(world: World) -> None:
    save_tiny(world.model, "phi3", **longrope(64))
    with pytest.raises(InputError, match=r"chunks of 64 tokens would mix RoPE regimes \(longrope:long\).*--chunk 128"):
        world.collect(world.stats, seq_len=128, chunk=64)
    with pytest.raises(InputError, match="no text fills 512 tokens"):
        world.collect(world.stats, seq_len=512, chunk=512, num_tokens=500)
    assert not world.stats.exists()
    header = read_stats(world.collect(world.stats, seq_len=128, chunk=128, num_tokens=800)).header
    assert header.data.got_tokens == 768 and any("1 sequences shorter than 128" in line for line in header.warnings)
    assert [rope.regime for rope in header.geometry.ropes] == ["longrope:long"]
    assert all(layer.unrotates for layer in header.geometry.layers)
    short = read_stats(world.collect(world.folder / "short", seq_len=64, chunk=32, num_tokens=800)).header
    assert [rope.regime for rope in short.geometry.ropes] == ["longrope:short"] and short.tokens > 600


def test_a_probe_is_run_in_the_regime_of_its_whole_sequence() -> None:
    """The probe may be cut short; the forward that gives it may not."""
    loaded = wrap_model(tiny_model("phi3", **longrope(64)), longest=LENGTH)
    geometry = self_check(loaded, tiny_tokens(48))
    sequences = [repeated(token, LENGTH) for token in range(3, 11)]
    _, plan = collect(loaded, geometry, sequences, only=set())
    cut = replace(plan, spans=dict.fromkeys(plan.spans, (0, 40)))
    part = collect(loaded, geometry, sequences, plan=cut)[0].result
    first = next(one for one in sequences if one.digest == part.probe[0])
    _, k = first_layer(loaded, first.tokens)
    torch.testing.assert_close(part.samples["probe.0.layers.0.k"].double(), k[:, :40], rtol=1e-4, atol=1e-5)
