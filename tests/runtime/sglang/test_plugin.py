"""The plugin in a small SGLang: on from end to end, absent where another backend is chosen, never on in part."""

from __future__ import annotations

import shutil
import tomllib
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import kvcq
from kvcq.artifacts.bundle import open_bundle
from kvcq.runtime.hf.load import load_cache
from kvcq.runtime.hf.semantics import Served
from kvcq.runtime.sglang import attend, metrics, plugin
from kvcq.runtime.sglang.later import Later
from kvcq.runtime.sglang.trace import read_trace
from kvcq.spec.boundary import Boundary
from tests.chain import python
from tests.runtime.hf.setup import relative, run
from tests.runtime.sglang import small
from tests.runtime.sglang.loop import PAGE, Loop, build
from tests.tiny import tiny_tokens


def test_a_server_attends_and_traces_what_the_replay_of_its_trace_computes(start, world, tmp_path):
    host = start()
    host.args.check_server_args()
    runner, backend = build(host)
    assert host.choices == ["triton", "kvcq"] and backend.needs_cpu_seq_lens is False
    model = AutoModelForCausalLM.from_pretrained(world[0], dtype=torch.float32)
    loop = Loop(host, runner, backend, model)
    first = tiny_tokens(77, seed=1).tolist()
    second = first[:PAGE] + tiny_tokens(29, seed=2).tolist()
    a = host.Req("a", first)
    assert a._compute_max_prefix_len(77) == 0
    answers = {"a": [loop.prefill([(a, 40)]), loop.prefill([(a, 76)])], "b": []}
    b = host.Req("b", second)
    # The last W tokens are computed anew: 93 - 8, whole pages of it.
    assert b._compute_max_prefix_len(93) == PAGE
    b.prefix_indices = runner.req_to_token_pool.req_to_token[a.req_pool_idx, :PAGE].clone()
    answers["b"] += [loop.prefill([(b, 80)]), loop.prefill([(b, 92)])]
    both = loop.decode([b, a])
    answers["b"].append(both[:1])
    answers["a"].append(both[1:])
    state = host.Scheduler().get_internal_state(None).internal_state["kvcq"]
    manifest = open_bundle(world[1]).manifest
    assert (state["digest"], state["rings"], state["clamped"]) == (manifest.digest, 2, 0)
    assert metrics.published().facts.bytes_per_token == runner.token_to_kv_pool.bytes_per_token
    for req in (a, b):
        runner.req_to_token_pool.free(req)
    plugin._PROCESS.attention.clamped += 3
    plugin._PROCESS.clamped = Later(plugin._PROCESS.attention.clamped)
    for _ in range(2):
        runner.req_to_token_pool.clear()
    assert metrics.published().clamped == 3
    records = {record.rid: record for record in read_trace(tmp_path / "trace.jsonl")}
    carried = Boundary(40, "carried")
    assert records["a"].boundaries == (carried,) and records["a"].prompt == 76
    assert records["b"].boundaries == (carried, Boundary(64, "cached"), Boundary(80, "carried"))
    for rid, tokens in (("a", first), ("b", second)):
        record = records[rid]
        cache = load_cache(world[1], model, semantics=Served(record.prompt, record.boundaries), kernels=True)
        edges = [0, *(boundary.position for boundary in record.boundaries), *range(record.prompt, len(tokens) + 1)]
        sizes = [stop - start for start, stop in pairwise(edges)]
        with cache:
            wanted = run(model, cache, torch.tensor(tokens), sizes)[0]
        found = torch.cat(answers[rid])
        assert relative(found, wanted[-len(found) :]) < 1e-3


@pytest.mark.parametrize("version", ["0.5.13.post1", "0.5.16"])
def test_every_way_of_building_pools_gives_ours(start, version):
    runner, backend = build(start(version))
    assert runner.token_to_kv_pool.store is not None and backend.token_to_kv_pool is runner.token_to_kv_pool
    plain = small.module("sglang.srt.mem_cache.memory_pool").MHATokenToKVPool
    assert plain is small.PlainPool


@pytest.mark.parametrize("version", ["0.5.13", "0.5.17"])
def test_a_server_with_another_backend_is_left_as_it_is(start, version):
    host = start(version, attention_backend="triton", max_running_requests=None)
    assert host.args.check_server_args() is None
    runner = host.Runner(host.args, host.config, 3, 256)
    configurator = small.module("sglang.srt.model_executor.pool_configurator").create_memory_pool_configurator
    assert configurator(runner) == "stock"
    runner.build(PAGE)
    assert type(runner.token_to_kv_pool) is small.PlainPool
    req = host.Req("a", [1] * 100)
    assert req._compute_max_prefix_len(100) == 99
    assert runner.req_to_token_pool.alloc([req]) == [1]
    runner.req_to_token_pool.free(req)
    runner.req_to_token_pool.clear()
    assert host.Scheduler().get_internal_state(None).internal_state == {}


@pytest.mark.parametrize("flags", [{"attention_backend": "triton"}, {"attention_backend": None}])
def test_a_bundle_that_nothing_would_read_ends_the_launcher(start, capsys, flags):
    host = start(json_model_override_args='{"kvcq": {"bundle": "/x", "digest": "0"}}', **flags)
    with pytest.raises(SystemExit) as ended:
        host.args.check_server_args()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "--attention-backend kvcq" in error and error.count("\n") == 1


@pytest.mark.parametrize("overrides", ["{}", '{"rope_theta": 1}', "[1]", "{", None])
def test_other_overrides_of_another_backend_are_left_alone(start, overrides):
    host = start(json_model_override_args=overrides, attention_backend="triton")
    assert host.args.check_server_args() is None


def test_what_writes_is_named_where_it_is_not_what_attends(start, monkeypatch):
    monkeypatch.setattr(attend, "writers", lambda tables, dtype, device: "cuda (keys) and triton (values)")
    host = start()
    build(host)
    kernels = host.Scheduler().get_internal_state(None).internal_state["kvcq"]["kernels"]
    assert set(kernels.values()) == {"triton, written by cuda (keys) and triton (values)"}


@pytest.mark.parametrize(("chunk", "longest"), [(100, 100), (8192, 256), (-1, 256), (None, 256)])
def test_a_library_is_prepared_for_the_longest_prompt_and_what_it_does_is_told(start, monkeypatch, chunk, longest):
    asked = []

    def prepare(layers, tables, heads, device, most):
        asked.append((len(layers), sorted(tables), heads, device.type, most))
        return frozenset(tables)

    monkeypatch.setattr(plugin, "prepare_layers", prepare)
    host = start(chunked_prefill_size=chunk)
    build(host)
    layers = host.config.layers
    assert asked == [(layers, list(range(layers)), host.config.num_attention_heads, "cpu", longest)]
    kernels = host.Scheduler().get_internal_state(None).internal_state["kvcq"]["kernels"]
    assert set(kernels.values()) == {"triton, long prompts by cuDNN"}


def test_other_weight_files_are_told_on_stderr_and_served(start, world, capsys, tmp_path):
    start(model_path=str(world[0])).args.check_server_args()
    assert "other weights" not in capsys.readouterr().err
    shutil.copytree(world[0], tmp_path / "tuned")
    weights = next((tmp_path / "tuned").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    start(model_path=str(tmp_path / "tuned")).args.check_server_args()
    line = capsys.readouterr().err
    assert line.startswith("warning: kvcq: the bundle was fitted on other weights") and line.count("\n") == 1


@pytest.mark.parametrize("source", ["disk", "tensor", "distributed", "ipc"])
def test_other_weights_are_not_loaded_under_a_bundle(start, source):
    host = start()
    update = getattr(host.Worker(), f"update_weights_from_{source}")
    assert update(object()) == (True, "loaded")
    build(host)
    done, why = update(object())
    assert not done and why.startswith("kvcq: the bundle was fitted for the loaded weights")


def test_a_prefix_whose_sinks_are_not_kept_ends_the_scheduler(start, capsys):
    host = start()
    runner, _ = build(host)
    request = host.Req("a", list(range(90)), prefix_indices=torch.zeros(PAGE))
    request.extend_range = SimpleNamespace(start=PAGE, end=90)
    with pytest.raises(SystemExit) as ended:
        runner.req_to_token_pool.alloc([request])
    assert ended.value.code == 5 and "sinks are not kept" in capsys.readouterr().err


def test_the_entry_point_is_the_plugin_and_imports_no_engine():
    project = tomllib.loads((Path(kvcq.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {"kvcq": "kvcq.runtime.sglang.plugin:activate"}
    code = "import sys, kvcq.runtime.sglang.plugin; print([m for m in ('sglang', 'transformers') if m in sys.modules])"
    done = python("-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, b"[]"), done.stderr
