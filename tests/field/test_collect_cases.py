"""What went wrong in the field when attention was calibrated, kind by kind, and the test that keeps it out.

| kind | tests |
|---|---|
| attention function registered without its mask function | test_own_logits_are_those_of_the_untouched_model, tests/capture/test_selfcheck.py::test_a_missing_mask_is_refused_with_the_first_layer, tests/models/test_attention.py::test_without_the_mask_function_the_model_sees_the_future |
| keys taken before their norm or rotation | test_captured_rows_are_the_cached_rows |
| layers that never pass through the hook | test_a_silent_layer_is_named_and_nothing_is_written, tests/capture/test_collect.py::test_silent_layers_are_named |
| extra argument of attention swallowed | test_sinks_count_and_unknown_arguments_stop, tests/models/test_attention.py::test_an_unknown_keyword_is_refused_by_name_and_layer |
| raw activations kept until the end | tests/capture/test_collect.py::test_memory_does_not_grow_with_the_number_of_sequences, test_memory_and_disk_are_told_before_the_first_forward |
| dump of raw rows fills the disk | test_rows_keep_to_their_budget_and_repeat, test_a_full_disk_stops_before_the_first_forward |
| padding rows in the sums | test_texts_of_any_lengths_count_alone, tests/capture/test_collect.py::test_texts_of_other_lengths_do_not_touch_a_texts_statistics |
| two BOS tokens from a rendered template | test_a_rendered_template_has_one_bos_and_two_are_told |
| messages without a chat template | test_messages_without_a_template_name_the_way_out |
| far less text than asked for | test_little_text_refuses_or_warns_in_the_header |
| recurrent layers calibrated on dummy input | test_only_full_layers_are_measured_and_from_the_start_of_real_text |
| weights damaged on the way to a device | test_a_model_worse_than_guessing_stops, tests/capture/test_collect.py::test_non_finite_activations_stop_with_layer_and_head |
| weights on the meta device | test_weights_without_data_are_named, test_offloaded_weights_are_collected_and_not_folded |
| head dimension computed from the hidden size | test_head_dimension_is_that_of_the_tensors, tests/models/test_geometry.py::test_head_dim_is_not_hidden_over_heads |
| code that comes with the model | tests/architectures/test_unlisted.py::test_own_code_is_not_run_unasked, tests/architectures/test_unlisted.py::test_trusted_code_is_told_and_refused_where_it_bypasses_the_hook |
| frequencies that change with the length | tests/architectures/test_positions.py::test_chunks_never_mix_regimes, tests/architectures/test_positions.py::test_collect_refuses_what_would_mix_and_leaves_short_sequences_out, tests/pipeline/test_models.py::test_rope_regime_is_that_of_the_sequences_and_is_told |
| queries taken at a patched rope function | test_captured_rows_are_the_cached_rows, tests/architectures/test_positions.py::test_keys_and_queries_of_one_token_unrotate_to_one_row |
| attention called twice a layer | tests/architectures/test_chain.py::test_what_cannot_be_served_is_refused_in_one_line_before_anything_is_written |
| layers that read another layer's cache | test_layers_that_share_a_cache_are_aliases_of_its_producer, tests/capture/test_collect.py::test_queries_of_sharing_layers_belong_to_the_producer |
| latent caches | tests/architectures/test_chain.py::test_latent_caches_are_refused_by_their_configuration_alone |
| windows on most layers | tests/pipeline/test_inspect_model.py::test_the_share_is_that_of_bytes_not_of_layers, tests/pipeline/test_models.py::test_a_model_without_an_eligible_layer_is_refused |
"""  # noqa: E501

from __future__ import annotations

import json
import re
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import cpu_offload

from kvcq.artifacts.stats_file import read_stats
from kvcq.capture.selfcheck import self_check
from kvcq.errors import InputError, KvcqError, ResourceError, UnsupportedError
from kvcq.models.attention import attention_hook, plain_attention
from kvcq.models.folding import fold_errors
from kvcq.models.library import forward, new_cache
from kvcq.models.load import wrap_model
from kvcq.pipeline import collect as collecting
from kvcq.pipeline.requests import CollectRequest
from kvcq.stats.part import merge_parts
from tests.capture.examples import collect, everything, loaded, sequence
from tests.chain import World, contents, write_text
from tests.library import dispatched_by_name
from tests.pipeline.test_fit_options import Listener
from tests.stats.examples import equal_parts
from tests.tiny import CHAT_TEMPLATE, save_tiny, tiny_model, tiny_tokenizer, tiny_tokens

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"num_tokens": 640, "seq_len": 64, "chunk": 64, "rows": 256, "query_rows": 32}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> World:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("field")
    text = write_text(folder / "text.txt", 1, 300)
    return World(folder=folder, model=save_tiny(folder / "model"), text=text, held_out=text)


@pytest.fixture
def world(shared: World, tmp_path: Path) -> World:
    return replace(shared, folder=tmp_path, fits={})


def told(world: World, **options: object) -> Listener:
    """Collect and return what was said."""
    listener = Listener()
    fields = {"model": str(world.model), "data": (str(world.text),), "out": world.stats} | SMALL | options
    collecting.collect(CollectRequest(**fields), listener)  # type: ignore[arg-type]
    return listener


def test_every_kind_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", __doc__ or "", re.MULTILINE)[2:]
    assert len(rows) > 18
    for kind, names in rows:
        for name in names.split(", "):
            path, _, test = name.rpartition("::")
            source = (ROOT / path if path else Path(__file__)).read_text(encoding="utf-8")
            assert f"def {test}(" in source, (kind, name)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss", "qwen3_next"])
def test_own_logits_are_those_of_the_untouched_model(model_type: str) -> None:
    model, tokens = tiny_model(model_type), tiny_tokens(40)[None]
    own, before = [], model.config._attn_implementation
    with attention_hook(model, plain_attention):
        own.append(forward(model, tokens))
    model.set_attn_implementation("eager")
    eager = forward(model, tokens)
    model.set_attn_implementation(before)
    assert float((own[0] - eager).norm() / eager.norm()) < 1e-4


# Norm per head, over the whole projection, and after the rotation; layers without rotation; no rotation at all.
ORDERS = {
    "qwen3": {},
    "qwen3_moe": {},
    "olmo2": {},
    "cohere": {"use_qk_norm": True},
    "hunyuan_v1_dense": {},
    "nanochat": {},
    "llama4_text": {},
    "smollm3": {},
    "cohere2": {},
    "phi": {},
    "gptj": {},
    "nemotron_h": {},
}


@pytest.mark.parametrize("model_type", ORDERS)
def test_captured_rows_are_the_cached_rows(model_type: str) -> None:
    """Bit for bit, in every layer that is measured; the captured query is the one that meets those keys."""
    with dispatched_by_name():
        source = wrap_model(tiny_model(model_type, **ORDERS[model_type]))
    geometry = self_check(source, tiny_tokens(48))
    calls, cache = {}, new_cache(source.model)
    with attention_hook(source.model, lambda call: (calls.__setitem__(call.layer, call), plain_attention(call))[1]):
        forward(source.model, tiny_tokens(24)[None], cache=cache)
    assert geometry.quantizable()
    for layer in geometry.quantizable():
        assert torch.equal(calls[layer.layer].key, cache.layers[layer.layer].keys)
        assert torch.equal(calls[layer.layer].value, cache.layers[layer.layer].values)
        assert calls[layer.layer].query.shape == (1, layer.q_heads, 24, layer.d_k)


def test_a_silent_layer_is_named_and_nothing_is_written(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = collecting.open_model

    class Own(torch.nn.Module):
        def forward(self, hidden_states, **options):
            return torch.softmax(hidden_states, -1), None

    def opened(*arguments: object, **options: object):
        found = real(*arguments, **options)
        found.model.model.layers[2].self_attn = Own()
        return found

    monkeypatch.setattr(collecting, "open_model", opened)
    with pytest.raises(UnsupportedError, match="layer 2"):
        world.collect(world.stats, **SMALL)
    assert not world.stats.exists()


def test_sinks_count_and_unknown_arguments_stop() -> None:
    source = loaded("gpt_oss")
    for layer in source.model.model.layers:
        layer.self_attn.sinks.fill_(2.0)
    assert all(layer.sinks for layer in self_check(source, tiny_tokens(48)).layers)
    with (
        attention_hook(source.model, plain_attention),
        pytest.raises(UnsupportedError, match=r"unknown argument 'fake' \(layer 0\)"),
    ):
        source.model(tiny_tokens(8)[None], fake=torch.zeros(1))


def test_memory_and_disk_are_told_before_the_first_forward(world: World) -> None:
    listener = told(world, dry_run=True)
    assert any(re.search(r"planned: \d+ MiB of memory .* \d+ MiB on disk", line) for line in listener.notes)
    assert "collecting" not in listener.stages and not world.stats.exists()


def test_rows_keep_to_their_budget_and_repeat(world: World) -> None:
    first = read_stats(world.collect(world.stats, **SMALL | {"rows": 100})).samples
    assert first["rows.positions"].shape == (100,)
    assert first["layers.0.rows.k"].shape == (2, 100, 32) and first["layers.0.rows.q"].shape == (4, 32, 32)
    assert contents(world.collect(world.folder / "again", **SMALL | {"rows": 100})) == contents(world.stats)
    other = read_stats(world.collect(world.folder / "seed", **SMALL | {"rows": 100, "seed": 1})).samples
    assert not np.array_equal(np.asarray(first["rows.hashes"]), np.asarray(other["rows.hashes"]))


def test_a_full_disk_stops_before_the_first_forward(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 99, 1))
    with pytest.raises(ResourceError, match=r"need \d+ MiB and 0 MiB are free.*--rows") as refusal:
        world.collect(world.stats, **SMALL)
    assert refusal.value.exit_code == 6 and not world.stats.exists()


def test_texts_of_any_lengths_count_alone() -> None:
    """Sequences run one at a time: no padding exists, and grouping texts changes no bit."""
    source = loaded("qwen3")
    geometry = self_check(source, tiny_tokens(48))
    texts = [sequence(1, 5), sequence(2, 12)]
    together = collect(source, geometry, texts, plan=everything(texts))[0].result
    alone = [collect(source, geometry, [one], plan=everything([one]))[0].result for one in texts]
    assert equal_parts(merge_parts(geometry, alone, 40, 10), together)
    assert together.tokens == 17


def chats(world: World, count: int = 40) -> Path:
    path = world.folder / "chats.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"the island and the stone {n} " * 3}]} for n in range(count)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def with_template(world: World, template: str | None) -> World:
    model = shutil.copytree(world.model, world.folder / "chatty")
    tiny_tokenizer(chat_template=template).save_pretrained(model)
    return replace(world, model=model)


def test_a_rendered_template_has_one_bos_and_two_are_told(world: World) -> None:
    """Tokenizer and template both write a BOS: rendered text is tokenized without special tokens."""
    once = told(with_template(world, CHAT_TEMPLATE), data=(str(chats(world)),))
    assert not any("BOS" in line for line in once.warnings)
    twice = world.folder / "twice.txt"
    twice.write_text("<s>" + world.text.read_text())
    listener = told(world, data=(str(twice),), out=world.folder / "twice")
    assert [line for line in listener.warnings if "two BOS" in line] == [
        "texts start with two BOS tokens: statistics of the first token are off"
    ]
    assert any("two BOS" in line for line in read_stats(world.folder / "twice").header.warnings)


def test_messages_without_a_template_name_the_way_out(world: World) -> None:
    with pytest.raises(InputError, match=r"no chat template.*--chat-template FILE") as refusal:
        told(world, data=(str(chats(world)),))
    assert refusal.value.exit_code == 2 and not world.stats.exists()
    (world.folder / "own.jinja").write_text(CHAT_TEMPLATE)
    told(world, data=(str(chats(world)),), chat_template=world.folder / "own.jinja")
    assert "template sha256" in read_stats(world.stats).header.data.template


def test_little_text_refuses_or_warns_in_the_header(world: World) -> None:
    few, some = world.folder / "few.txt", world.folder / "some.txt"
    few.write_text("the sand and the island " * 4)
    with pytest.raises(InputError, match="tokens are too few for heads of 32 channels") as refusal:
        told(world, data=(str(few),))
    assert refusal.value.exit_code == 2 and not world.stats.exists()
    some.write_text(world.text.read_text()[:400])
    listener = told(world, data=(str(some),))
    header = read_stats(world.stats).header
    assert header.data.got_tokens < header.data.wanted_tokens == 640
    assert any(f"{header.data.got_tokens} of 640 tokens wanted" in line for line in header.warnings)
    assert set(header.warnings) <= set(listener.warnings)


def test_only_full_layers_are_measured_and_from_the_start_of_real_text(world: World) -> None:
    save_tiny(world.folder / "hybrid", "qwen3_next")
    stats = read_stats(replace(world, model=world.folder / "hybrid").collect(world.stats, **SMALL))
    assert {name.split(".")[1] for name in stats.moments} == {"0", "2"}
    assert stats.header.skipped == {"1": "linear attention", "3": "linear attention"}
    # The first token's row is sampled from position 0 of a sequence, behind no other input.
    assert int(np.asarray(stats.samples["rows.positions"]).min()) == 0
    assert stats.header.longest == 64


def test_a_model_worse_than_guessing_stops(world: World) -> None:
    model = tiny_model()
    model.lm_head.weight *= 50
    model.save_pretrained(world.folder / "damaged")
    tiny_tokenizer().save_pretrained(world.folder / "damaged")
    with pytest.raises(InputError, match=r"far above the 4\.9 of guessing") as refusal:
        replace(world, model=world.folder / "damaged").collect(world.stats, **SMALL)
    assert "damaged" in str(refusal.value) and not world.stats.exists()


def test_weights_without_data_are_named() -> None:
    model = tiny_model()
    model.model.layers[2].self_attn.o_proj.to("meta")
    with pytest.raises(InputError, match=r"weight model\.layers\.2\.self_attn\.o_proj\.weight is on the meta device"):
        wrap_model(model)


def test_offloaded_weights_are_collected_and_not_folded() -> None:
    """Between forwards an offloaded weight is a meta tensor too, and every forward brings it."""
    expected = collect(loaded(), loaded().geometry, [sequence(1, 40)])[0].result
    model = tiny_model()
    cpu_offload(model, execution_device="cpu")
    source = wrap_model(model)
    assert source.device.type == "cpu" and all(layer.unrotates for layer in self_check(source, tiny_tokens(48)).layers)
    assert equal_parts(collect(source, source.geometry, [sequence(1, 40)])[0].result, expected)
    assert fold_errors(model, tiny_tokens(16), [0]) == {0: (None, "the weights are offloaded")}


def test_head_dimension_is_that_of_the_tensors(world: World) -> None:
    save_tiny(world.folder / "wide", "gpt_oss", hidden_size=80, num_attention_heads=4, head_dim=32)
    header = read_stats(replace(world, model=world.folder / "wide").collect(world.stats, **SMALL)).header
    assert [(layer.q_heads, layer.kv_heads, layer.d_k) for layer in header.geometry.quantizable()] == [(4, 2, 32)] * 2
    model = tiny_model("gpt_oss")
    model.config.head_dim = 16
    with pytest.raises(UnsupportedError, match="receives 32 channels a head, the configuration says 16"):
        wrap_model(model)


def test_layers_that_share_a_cache_are_aliases_of_its_producer(world: World) -> None:
    save_tiny(world.folder / "sharing", "gemma3n_text")
    stats = read_stats(replace(world, model=world.folder / "sharing").collect(world.stats, **SMALL))
    sources = {layer.layer: layer.source for layer in stats.header.geometry.layers if layer.kind == "shared"}
    assert sources == {4: 2, 5: 3}
    assert {name.split(".")[1] for name in stats.moments} == {"0", "2"}
    assert stats.header.skipped["4"] == "shared attention, reads the cache of layer 2"
    assert stats.moments["layers.2.queries"][0] == 2 * stats.moments["layers.0.queries"][0]


def test_every_refusal_is_one_line(world: World) -> None:
    for model_type in ("falcon", "mistral"):
        save_tiny(world.folder / model_type, model_type)
        with pytest.raises(KvcqError) as refusal:
            replace(world, model=world.folder / model_type).collect(world.stats, **SMALL)
        assert "\n" not in str(refusal.value) and model_type in str(refusal.value)
    assert not world.stats.exists()
