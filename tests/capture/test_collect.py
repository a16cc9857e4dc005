import numpy as np
import psutil
import pytest
import torch

from kvcq.capture.selfcheck import self_check
from kvcq.errors import InputError, UnsupportedError
from kvcq.models.attention import attention_hook, plain_attention
from kvcq.stats.accumulator import LayerSums
from kvcq.stats.part import merge_parts
from kvcq.stats.probe import choose_probe
from kvcq.stats.rotary import rotate
from tests.capture.examples import collect, everything, loaded, sequence
from tests.stats.examples import equal_parts
from tests.tiny import tiny_tokens

LLAMA = loaded("llama")
GEOMETRY = self_check(LLAMA, tiny_tokens(48))
SEQUENCES = [sequence(n, 40 + 7 * n) for n in range(7)]


def calls_of(source, tokens):
    seen = {}

    def hook(call):
        output = plain_attention(call)
        seen[call.layer] = [x[0].double() for x in (call.query, call.key, call.value, output)]
        return output

    with attention_hook(source.model, hook):
        source.model(torch.as_tensor(tokens).long()[None])
    return seen


def value(part, geometry, layer, name):
    one = geometry.layers[layer]
    prefix = f"layers.{layer}."
    own = {n.removeprefix(prefix): a for n, a in part.moments.items() if n.startswith(prefix)}
    return LayerSums.from_arrays(one, geometry.rope_of(one), own).sums[name].value()


def test_moments_equal_plain_sums_over_the_models_own_calls():
    part = collect(LLAMA, GEOMETRY, SEQUENCES[:2], plan=everything(SEQUENCES[:2]))[0].result
    runs = [calls_of(LLAMA, one.tokens) for one in SEQUENCES[:2]]
    for layer in range(4):
        for name, at in (("k", 1), ("v", 2)):
            expected = sum(run[layer][at].transpose(1, 2) @ run[layer][at] for run in runs)
            torch.testing.assert_close(value(part, GEOMETRY, layer, f"{name}_moment"), expected)
        for name, at in (("q", 0), ("o", 3)):
            grouped = [run[layer][at].reshape(2, -1, 32) for run in runs]
            expected = sum(rows.transpose(1, 2) @ rows for rows in grouped)
            torch.testing.assert_close(value(part, GEOMETRY, layer, f"{name}_moment"), expected)
        rope = GEOMETRY.rope_of(GEOMETRY.layers[layer])
        back = [rotate(run[layer][1], torch.arange(run[layer][1].shape[1]), rope, inverse=True) for run in runs]
        torch.testing.assert_close(value(part, GEOMETRY, layer, "k0_sum"), sum(rows.sum(1) for rows in back))
    assert part.tokens == 40 + 47


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3_next"])
def test_chunks_do_not_change_statistics(model_type):
    source = loaded(model_type)
    geometry = self_check(source, tiny_tokens(48))
    whole = collect(source, geometry, SEQUENCES[:2])[0].result
    pieces = collect(source, geometry, SEQUENCES[:2], chunk=11)[0].result
    for name in ("rows.positions", "rows.hashes", "rows.sequence", "rows.index", "probe.0.positions"):
        assert torch.equal(whole.samples[name], pieces.samples[name])
    for name, rows in whole.samples.items():
        torch.testing.assert_close(rows, pieces.samples[name], rtol=1e-3, atol=1e-3)
    for layer in geometry.quantizable():
        for name in ("k_moment", "q0_moment", "v_sum", "o_moment"):
            a, b = (value(part, geometry, layer.layer, name) for part in (whole, pieces))
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-2)


def test_probe_is_left_out_of_moments_and_samples():
    capture, plan = collect(LLAMA, GEOMETRY, SEQUENCES)
    part = capture.result
    rest = [one for one in SEQUENCES if one.digest not in plan.spans]
    assert part.probe == plan.digests
    assert set(part.sequences) == {one.digest for one in rest}
    assert part.tokens == sum(len(one.tokens) for one in rest)
    alone = collect(LLAMA, GEOMETRY, rest, plan=everything(rest))[0].result
    assert all(np.array_equal(part.moments[name], alone.moments[name]) for name in alone.moments)
    for i, digest in enumerate(part.probe):
        tokens = next(one.tokens for one in SEQUENCES if one.digest == digest)
        q, k, v, _ = calls_of(LLAMA, tokens)[2]
        torch.testing.assert_close(part.samples[f"probe.{i}.layers.2.k"].double(), k)
        torch.testing.assert_close(part.samples[f"probe.{i}.layers.2.v"].double(), v)
        index = part.samples[f"probe.{i}.q_index"].long()
        torch.testing.assert_close(part.samples[f"probe.{i}.layers.2.q"].double(), q[:, index])


def test_sampled_rows_are_the_models_rows():
    part = collect(LLAMA, GEOMETRY, SEQUENCES)[0].result
    runs = {one.digest: calls_of(LLAMA, one.tokens) for one in SEQUENCES}
    for i in range(part.samples["rows.positions"].shape[0]):
        run = runs[part.sequences[part.samples["rows.sequence"][i]]][1]
        position = part.samples["rows.positions"][i]
        torch.testing.assert_close(part.samples["layers.1.rows.k"][:, i].double(), run[1][:, position])
        if i < 10:
            torch.testing.assert_close(part.samples["layers.1.rows.q"][:, i].double(), run[0][:, position])


def test_order_shards_and_interruptions_are_bit_equal():
    plan = choose_probe([(one.digest, one.segments) for one in SEQUENCES])
    whole = collect(LLAMA, GEOMETRY, SEQUENCES)[0].result
    assert equal_parts(whole, collect(LLAMA, GEOMETRY, SEQUENCES[::-1])[0].result)
    shards = [collect(LLAMA, GEOMETRY, SEQUENCES[i::2], plan=plan)[0].result for i in range(2)]
    assert equal_parts(merge_parts(GEOMETRY, shards, 40, 10), whole)
    first, rest = (collect(LLAMA, GEOMETRY, SEQUENCES, only=only)[0].result for only in ({0, 1, 2}, {3, 4, 5, 6}))
    assert equal_parts(merge_parts(GEOMETRY, [rest, first], 40, 10), whole)


def test_segments_are_forwarded_on_their_own():
    joined = sequence(1, 60, ((0, 25), (25, 60)))
    parts = [sequence(1, 60).tokens[:25], sequence(1, 60).tokens[25:]]
    part = collect(LLAMA, GEOMETRY, [joined], plan=everything([joined]), rows=60)[0].result
    expected = sum(run[3][1].transpose(1, 2) @ run[3][1] for run in (calls_of(LLAMA, tokens) for tokens in parts))
    torch.testing.assert_close(value(part, GEOMETRY, 3, "k_moment"), expected)
    order = torch.argsort(part.samples["rows.index"])
    assert part.samples["rows.positions"][order].tolist() == [*range(25), *range(35)]


def test_only_full_layers_have_statistics():
    source = loaded("gemma2")
    geometry = self_check(source, tiny_tokens(48))
    part = collect(source, geometry, SEQUENCES[:1])[0].result
    layers = {int(name.split(".")[1]) for name in part.moments}
    assert layers == {layer.layer for layer in geometry.quantizable()} == {1, 3}


@pytest.mark.parametrize("chunk", [1000, 13])
def test_queries_of_sharing_layers_belong_to_the_producer(chunk):
    source = loaded("gemma3n_text")
    geometry = self_check(source, tiny_tokens(48))
    shared = next(layer for layer in geometry.layers if layer.source == 2)
    part = collect(source, geometry, SEQUENCES[:1], plan=everything(SEQUENCES[:1]), chunk=chunk)[0].result
    run = calls_of(source, SEQUENCES[0].tokens)
    rows = torch.cat([run[number][0].reshape(2, -1, 32) for number in (2, shared.layer)], dim=1)
    torch.testing.assert_close(value(part, geometry, 2, "q_moment"), rows.transpose(1, 2) @ rows, rtol=1e-4, atol=1e-2)
    assert part.moments["layers.2.queries"][0] == 2 * 2 * 40
    assert part.moments["layers.2.tokens"][0] == 40


def test_non_finite_activations_stop_with_layer_and_head():
    source = loaded("llama")
    source.model.model.layers[1].self_attn.v_proj.weight[40] = float("nan")
    with pytest.raises(InputError, match=r"v is not finite \(layer 1, KV head 1\)"):
        collect(source, GEOMETRY, SEQUENCES[:1])


def test_silent_layers_are_named():
    source = loaded("llama")

    class Own(torch.nn.Module):
        def forward(self, hidden_states, **options):
            return torch.softmax(hidden_states, -1), None

    source.model.model.layers[2].self_attn = Own()
    with pytest.raises(UnsupportedError, match="layer 2 "):
        collect(source, GEOMETRY, SEQUENCES[:1])


def test_a_capture_leaves_the_model_as_found():
    implementation = LLAMA.model.config._attn_implementation
    collect(LLAMA, GEOMETRY, SEQUENCES[:1])
    assert LLAMA.model.config._attn_implementation == implementation


def test_misuse_is_refused():
    capture, _ = collect(LLAMA, GEOMETRY, SEQUENCES[:1])
    with pytest.raises(InputError, match="twice"):
        capture.run(SEQUENCES[0], 100)
    with pytest.raises(InputError, match="outside the plan"):
        capture.run(SEQUENCES[1], 100)
    with pytest.raises(InputError, match="--chunk"):
        capture.run(SEQUENCES[1], 0)


def test_memory_does_not_grow_with_the_number_of_sequences():
    many = [sequence(100 + n, 64) for n in range(150)]
    process = psutil.Process()
    collect(LLAMA, GEOMETRY, many[:50])
    before = process.memory_info().rss
    collect(LLAMA, GEOMETRY, many)
    assert process.memory_info().rss < 1.05 * before


def test_texts_of_other_lengths_do_not_touch_a_texts_statistics():
    texts = [sequence(1, 5), sequence(2, 12)]
    together = collect(LLAMA, GEOMETRY, texts, plan=everything(texts))[0].result
    alone = [collect(LLAMA, GEOMETRY, [one], plan=everything([one]))[0].result for one in texts]
    assert equal_parts(merge_parts(GEOMETRY, alone, 40, 10), together)
    assert together.tokens == 17
