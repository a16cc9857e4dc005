"""The plugin in a small SGLang: on from end to end, absent where another backend is chosen, never on in part."""

from __future__ import annotations

import inspect
import json
import pkgutil
import shutil
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fastapi import FastAPI
from transformers import AutoModelForCausalLM

import kvcq
from kvcq.artifacts.bundle import open_bundle
from kvcq.models.attention import attention_hook
from kvcq.models.library import forward
from kvcq.runtime.hf.load import load_cache
from kvcq.runtime.hf.semantics import Served
from kvcq.runtime.sglang import admission, gate, metrics, plugin, versions
from kvcq.runtime.sglang.later import Later
from kvcq.runtime.sglang.trace import read_trace
from kvcq.spec.boundary import Boundary
from tests.chain import make_world, python
from tests.runtime.hf.setup import relative, run
from tests.runtime.sglang import small
from tests.tiny import tiny_tokens

PAGE = 64


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    made = make_world(tmp_path_factory.mktemp("sglang") / "world", ("oscar",), num_hidden_layers=2)
    return made.model, made.pack("oscar", made.folder / "oscar.kvcq")


@pytest.fixture
def start(world, monkeypatch, tmp_path):
    """A function from a release and flags to a small SGLang whose plugins have been loaded."""
    model, path = world
    digest = open_bundle(path).manifest.digest

    def begin(version="0.5.15.post1", override=None, **flags):
        host = small.install(monkeypatch, version)
        monkeypatch.setattr(versions, "installed", lambda: version)
        monkeypatch.setattr(plugin, "_PROCESS", plugin._Process())
        monkeypatch.setattr(metrics, "_published", [])
        admission.uninstall()
        given = {"bundle": str(path), "digest": digest, "trace": str(tmp_path / "trace.jsonl")} | (override or {})
        config = json.loads((model / "config.json").read_text())
        hf_config = SimpleNamespace(kvcq=given, to_dict=lambda: config)
        host.config = SimpleNamespace(
            hf_config=hf_config,
            dtype=torch.float32,
            num_attention_heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            layers=config["num_hidden_layers"],
            context_len=256,
        )
        chosen = {
            "attention_backend": "kvcq",
            "max_running_requests": 3,
            "page_size": 64,
            "tp_size": 1,
            "enable_metrics": False,
            # Models are served in bfloat16, whose products are wrong in the interpreter.
            "config": SimpleNamespace(**vars(host.config) | {"dtype": torch.bfloat16}),
        }
        host.args = host.ServerArgs(**chosen | flags)
        plugin.activate()
        host.registry.apply_hooks()
        return host

    yield begin
    admission.uninstall()


def build(host, tokens=PAGE * 8):
    """Build pool and backend in the order of a model runner."""
    configurator = small.module("sglang.srt.model_executor.pool_configurator").create_memory_pool_configurator
    runner = host.Runner(host.args, host.config, 3, 256)
    sized = configurator(runner)
    if sized != "stock":
        assert sized.calculate_pool_sizes_from_max_tokens(tokens + 5, PAGE).max_total_num_tokens == tokens
    runner.build(tokens)
    return runner, host.backends["kvcq"](runner)


class Loop:
    """A scheduler of a small SGLang: prefill batches and decode steps, eager."""

    def __init__(self, host, runner, backend, model):
        self.host, self.runner, self.backend, self.model = host, runner, backend, model
        self.pages = list(range(1, runner.token_to_kv_pool.size // PAGE + 1))

    def prefill(self, parts):
        """Parts are (request, end): its tokens behind what is committed, or behind its prefix, up to `end`."""
        firsts = [req.kv_committed_len or len(req.prefix_indices) for req, _ in parts]
        for (req, end), first in zip(parts, firsts, strict=True):
            req.extend_range = SimpleNamespace(start=first, end=end)
        rows = self.runner.req_to_token_pool.alloc([req for req, _ in parts])
        table = self.runner.req_to_token_pool.req_to_token
        for (req, end), first in zip(parts, firsts, strict=True):
            if not req.kv_committed_len and first:
                table[req.req_pool_idx, :first] = req.prefix_indices
            self._take(req, first, end)
        counts = [end - first for (_, end), first in zip(parts, firsts, strict=True)]
        spans = [range(first, end) for (_, end), first in zip(parts, firsts, strict=True)]
        return self._run(
            small.Mode.EXTEND,
            parts,
            rows,
            spans,
            extend_seq_lens=torch.tensor(counts, dtype=torch.int32),
            extend_seq_lens_cpu=counts,
            extend_prefix_lens_cpu=firsts,
            extend_num_tokens=sum(counts),
            rids=[req.rid for req, _ in parts],
        )

    def decode(self, reqs):
        parts = [(req, req.kv_committed_len + 1) for req in reqs]
        spans = [range(req.kv_committed_len, end) for req, end in parts]
        for (req, end), span in zip(parts, spans, strict=True):
            self._take(req, span.start, end)
        return self._run(small.Mode.DECODE, parts, [req.req_pool_idx for req in reqs], spans)

    def _take(self, req, first, end):
        table = self.runner.req_to_token_pool.req_to_token
        for position in range(first, end):
            page = self.pages.pop(0) if position % PAGE == 0 else int(table[req.req_pool_idx, position - 1]) // PAGE
            table[req.req_pool_idx, position] = page * PAGE + position % PAGE
        req.kv_committed_len = end

    def _run(self, mode, parts, rows, spans, **others):
        table = self.runner.req_to_token_pool.req_to_token
        slots = [table[row, span.start : span.stop].long() for row, span in zip(rows, spans, strict=True)]
        batch = SimpleNamespace(
            forward_mode=mode,
            batch_size=len(parts),
            req_pool_indices=torch.tensor(rows),
            seq_lens=torch.tensor([end for _, end in parts]),
            out_cache_loc=torch.cat(slots),
            **{"extend_seq_lens": None} | others,
        )
        tokens = torch.tensor([req.tokens[i] for (req, _), span in zip(parts, spans, strict=True) for i in span])
        positions = torch.tensor([i for span in spans for i in span])
        self.backend.init_forward_metadata(batch)

        def attend(call):
            layer = layer_of(call)
            q, k, v = (x[0].transpose(0, 1).flatten(1) for x in (call.query, call.key, call.value))
            out = self.backend.forward(q, k, v, layer, batch)
            return out.view(len(tokens), -1, layer.v_head_dim).transpose(0, 1)[None]

        with attention_hook(self.model, attend):
            return forward(self.model, tokens[None], positions=positions)[0]


def layer_of(call, **changes):
    """``RadixAttention`` of an attention call."""
    plain = {
        "layer_id": call.layer,
        "tp_q_head_num": call.query.shape[1],
        "tp_k_head_num": call.key.shape[1],
        "tp_v_head_num": call.value.shape[1],
        "qk_head_dim": call.key.shape[-1],
        "v_head_dim": call.value.shape[-1],
        "scaling": call.scaling,
        "logit_cap": 0.0,
        "logit_capping_method": "tanh",
        "sliding_window_size": -1,
        "is_cross_attention": False,
        "attn_type": SimpleNamespace(value="decoder"),
        "xai_temperature_len": -1,
    }
    return SimpleNamespace(**plain | changes)


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


def test_a_release_outside_the_window_is_told_and_left_alone(monkeypatch, capsys):
    host = small.install(monkeypatch, "0.5.15")
    monkeypatch.setattr(versions, "installed", lambda: "0.5.23")
    plugin.activate()
    assert host.choices == ["triton"] and not host.backends and not host.registry.hooks
    assert "0.5.23" in (line := capsys.readouterr().err) and line.startswith("kvcq is not loaded: ")
    assert line.count("\n") == 1


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


@pytest.mark.parametrize("version", ["0.5.15.post1", "0.5.17"])
@pytest.mark.parametrize(
    "name", ["refuse", "size", "pool", "match_cap", "sink_bind", "sink_unpin", "sink_clear", "report", "weights_disk"]
)
def test_without_any_one_hook_there_is_no_server(start, capsys, monkeypatch, name, version):
    whole = plugin.FUNCTIONS[name]
    original = small.make_registry

    def without():
        registry = original()
        plain = registry.register.__func__

        def register(cls, target, hook, hook_type):
            if hook is not whole:
                plain(cls, target, hook, hook_type)

        registry.register = classmethod(register)
        return registry

    monkeypatch.setattr(small, "make_registry", without)
    host = start(version)
    runner = host.Runner(host.args, host.config, 3, 256)
    runner.build(PAGE)
    # The launcher ends before weights load; the scheduler looks for itself.
    ends = [lambda: host.backends["kvcq"](runner)] + ([host.args.check_server_args] if name != "refuse" else [])
    for end in ends:
        with pytest.raises(SystemExit) as ended:
            end()
        assert ended.value.code == 5
        line = capsys.readouterr().err
        assert line.startswith("error: ") and f"the hook {name} " in line and line.count("\n") == 1


@pytest.mark.parametrize(
    ("override", "flags", "code", "words"),
    [
        ({"digest": "0" * 64}, {}, 5, "the server was started for 000000000000"),
        ({"bundle": "/nowhere/x.kvcq"}, {}, 2, "/nowhere/x.kvcq"),
        ({"colour": "red"}, {}, 2, "unknown key 'colour'"),
        ({}, {"max_running_requests": None}, 2, "--max-running-requests"),
        ({}, {"enable_mixed_chunk": True}, 2, "--enable-mixed-chunk"),
        ({}, {"SGLANG_USE_HND_KVCACHE": True}, 2, "SGLANG_USE_HND_KVCACHE"),
    ],
)
def test_what_is_not_served_ends_the_launcher_with_one_line(start, capsys, override, flags, code, words):
    host = start(override=override, **flags)
    variables = {name: SimpleNamespace(get=lambda: True) for name in flags if name.isupper()}
    vars(small.module("sglang.srt.environ").envs).update(variables)
    with pytest.raises(SystemExit) as ended:
        host.args.check_server_args()
    line = capsys.readouterr().err
    assert ended.value.code == code and words in line and line.count("\n") == 1


@pytest.mark.parametrize("version", ["0.5.13", "0.5.17"])
def test_a_launcher_that_is_told_of_a_gate_puts_it_in_front_or_ends(start, capsys, monkeypatch, version):
    app = FastAPI()
    home = SimpleNamespace(http_server=SimpleNamespace(app=app))

    def launch(override, **flags):
        host = start(version, override=override, **flags)
        monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints", home)
        host.args.check_server_args()

    launch({})
    assert not isinstance(app.build_middleware_stack(), gate.Gate)
    launch({"gate": "0" * 64})
    assert isinstance(app.build_middleware_stack(), gate.Gate)
    for flags, http in (({"tokenizer_worker_num": 2}, home.http_server), ({}, SimpleNamespace())):
        home.http_server = http
        with pytest.raises(SystemExit) as ended:
            launch({"gate": "0" * 64}, **flags)
        line = capsys.readouterr().err
        assert ended.value.code == 5 and "not proven yet is not in place" in line and line.count("\n") == 1


def test_a_variable_that_replaces_the_pool_ends_the_launcher(start, capsys):
    host = start()
    envs = pkgutil.resolve_name("sglang.srt.environ").envs
    envs.SGLANG_USE_HND_KVCACHE.get = lambda: True
    with pytest.raises(SystemExit) as ended:
        host.args.check_server_args()
    assert ended.value.code == 2 and "SGLANG_USE_HND_KVCACHE" in capsys.readouterr().err


def test_a_pool_of_bf16_rows_ends_the_scheduler(start, capsys):
    host = start()
    runner = host.Runner(host.args, host.config, 3, 256)
    runner.token_to_kv_pool = small.PlainPool(PAGE, 64, torch.bfloat16, 2, 32, 2, "cpu", False)
    with pytest.raises(SystemExit) as ended:
        host.backends["kvcq"](runner)
    assert ended.value.code == 5 and "BF16" in capsys.readouterr().err


def test_a_prefix_whose_sinks_are_not_kept_is_an_error_and_no_answer(start):
    host = start()
    runner, _ = build(host)
    request = host.Req("a", list(range(90)), prefix_indices=torch.zeros(PAGE))
    request.extend_range = SimpleNamespace(start=PAGE, end=90)
    with pytest.raises(RuntimeError, match="sinks are not kept"):
        runner.req_to_token_pool.alloc([request])


def test_the_entry_point_is_the_plugin_and_imports_no_engine():
    project = tomllib.loads((Path(kvcq.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {"kvcq": "kvcq.runtime.sglang.plugin:activate"}
    code = "import sys, kvcq.runtime.sglang.plugin; print([m for m in ('sglang', 'transformers') if m in sys.modules])"
    done = python("-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, b"[]"), done.stderr


def test_every_release_tells_the_ranks_of_attention(sources):
    context = "sglang.srt.runtime_context"
    if sources.has(context):
        assert sources.parameters(f"{context}.get_parallel") == []
        for name in ("attn_tp_size", "attn_tp_rank"):
            assert sources.function(f"{context}.ParallelContext.{name}").decorator_list
    else:
        for name in ("get_attention_tp_size", "get_attention_tp_rank"):
            assert sources.parameters(f"sglang.srt.layers.dp_attention.{name}") == []


def test_the_small_sglang_has_the_parameters_of_the_real_one(sources, monkeypatch):
    small.install(monkeypatch, sources.version)
    for target in small.SIGNATURES:
        live = pkgutil.resolve_name(target)
        wanted = [name for name in sources.parameters(target) if name != "self"]
        found = [name for name in inspect.signature(live).parameters if name not in ("self", "kwargs")]
        # Later releases add parameters with defaults at the end.
        assert inspect.isbuiltin(live) or found == wanted[: len(found)], target
