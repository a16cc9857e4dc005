"""What ends a launcher or a scheduler of a small SGLang, with one line, before anything is answered."""

from __future__ import annotations

import pkgutil
import sys
from types import SimpleNamespace

import pytest
import torch
from fastapi import FastAPI

from kvcq.runtime.sglang import gate, plugin, versions
from tests.runtime.sglang import small
from tests.runtime.sglang.loop import PAGE


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


def test_a_release_outside_the_window_is_told_and_left_alone(monkeypatch, capsys):
    host = small.install(monkeypatch, "0.5.15")
    monkeypatch.setattr(versions, "installed", lambda: "0.5.23")
    plugin.activate()
    assert host.choices == ["triton"] and not host.backends and not host.registry.hooks
    assert "0.5.23" in (line := capsys.readouterr().err) and line.startswith("kvcq is not loaded: ")
    assert line.count("\n") == 1
