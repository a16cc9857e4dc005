"""What must hold before a server is ready, and the command as a process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys

import httpx2
import pytest

from kvcq.artifacts.bundle import open_bundle
from kvcq.cli.main import execute
from kvcq.cli.values import parse_size
from kvcq.errors import InputError, MismatchError, UnavailableError
from kvcq.models.library import forward, new_cache
from kvcq.models.load import load_model
from kvcq.pipeline import proof
from kvcq.pipeline.proof import prove
from kvcq.pipeline.serve import serve
from kvcq.runtime.codecs import served_codecs
from kvcq.runtime.hf.cache import Host
from tests.chain import bare_environment
from tests.forked import Forked
from tests.serve.conftest import request_of
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def parts(tiny):
    """Bundle, model and codecs as serve puts them together."""
    bundle = open_bundle(tiny.folder / "nova.kvcq")
    loaded = load_model(str(tiny.model))
    manifest = bundle.manifest
    return bundle, loaded, served_codecs(manifest.plan, manifest.geometry, bundle.tensors, "cpu")


def host_of(parts, codecs=None, **options):
    bundle, loaded, own = parts
    manifest = bundle.manifest
    return Host(loaded.model, codecs or own, manifest.geometry, manifest.recipe.windows, **options)


def test_the_bundle_that_is_on_proves_it(parts):
    with host_of(parts) as host:
        found = prove(parts[0], host)
    assert 0.7 < found.statistic < 1.3
    rows = 4 + 8 + 64
    assert found.allocated == 4 * 2 * ((16 + 8) * 256 + 2 * 32 * 2 * rows) and found.tokens == 204


def test_a_cache_that_is_off_is_refused(parts, monkeypatch):
    kept = {}

    def plain(model, tokens, *, cache, keep=None):
        _, own = kept.setdefault(id(cache), (cache, new_cache(model)))
        return forward(model, tokens, cache=own, keep=keep)

    monkeypatch.setattr(proof, "forward", plain)
    monkeypatch.setattr(proof, "check_memory", lambda *_: 0)
    with host_of(parts) as host, pytest.raises(MismatchError, match=r"canary -?0\.0") as refused:
        prove(parts[0], host)
    assert refused.value.exit_code == 5


def test_a_cache_that_takes_more_memory_is_refused(parts):
    with host_of(parts, mode="simulate") as host, pytest.raises(MismatchError, match="bytes, the layout has"):
        prove(parts[0], host)


@pytest.mark.parametrize(
    ("options", "error", "line"),
    [
        ({"bundle": "fits/nova"}, InputError, "not a bundle"),
        ({"memory": 1000}, InputError, "do not hold the exact rows of 8 requests"),
        ({"max_context": 513}, InputError, "the model's context is 512"),
        ({"memory": 150_000, "max_running": 1, "max_context": 512}, InputError, "not 512"),
        ({"host": "no such host"}, InputError, "no address .*: use an address of this machine"),
        ({"chat_template": "missing.jinja"}, InputError, "cannot read missing.jinja"),
        ({"host": "203.0.113.1"}, InputError, "cannot listen on"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_before_the_model_is_loaded(tiny, options, error, line, monkeypatch):
    monkeypatch.setattr("kvcq.pipeline.serve.open_model", None)
    if "bundle" in options:
        options = {"bundle": tiny.folder / options["bundle"]}
    with pytest.raises(error, match=line):
        serve(request_of(tiny, **options))


def test_a_port_in_use_is_named(tiny):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1:{taken.getsockname()[1]}"):
            serve(request_of(tiny, port=taken.getsockname()[1]))


def test_another_model_is_refused(tiny, tmp_path):
    other = save_tiny(tmp_path / "other", num_key_value_heads=4)
    with pytest.raises(MismatchError, match="fitted for another model"):
        serve(request_of(tiny, model=str(other)))


def test_other_weights_warn_and_strict_refuses_them(tiny, tmp_path):
    other = save_tiny(tmp_path / "other", seed=5)
    with pytest.raises(MismatchError, match="other weights"):
        serve(request_of(tiny, model=str(other), strict=True))


def test_without_the_extra_the_line_names_it(tiny, monkeypatch):
    monkeypatch.setattr("kvcq.pipeline.serve.find_spec", lambda name: None if name == "uvicorn" else name)
    with pytest.raises(UnavailableError) as refused:
        serve(request_of(tiny))
    assert str(refused.value) == "serving needs uvicorn (serve): pip install 'kvcq[serve]'"
    assert refused.value.exit_code == 7


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--engine", "vllm"], "error: 'vllm' is not allowed (--engine): use hf, sglang"),
        (["--trace", "t"], "error: --trace is not for --engine hf (--trace): leave it out, or choose the other engine"),
        (["--memory", "lots"], "error: 'lots' is not a size (--memory): write for example 512M or 2G"),
    ],
)
def test_flags_are_checked_first(words, line, capsys):
    assert execute(["serve", "nothing.kvcq", "--model", "m", *words]) == 2
    assert capsys.readouterr().err.strip() == line


def test_a_grace_without_end_is_refused(capsys):
    assert execute(["serve", "nothing.kvcq", "--model", "m", "--grace", "inf"]) == 2
    assert "'--grace'" in capsys.readouterr().err


def test_sizes_have_binary_units():
    sizes = {"4096": 4096, "1k": 1024, "512M": 512 << 20, "2G": 2 << 30, "2GiB": 2 << 30, "1tb": 1 << 40}
    assert {text: parse_size(text, "--memory") for text in sizes} == sizes


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (signal.SIGTERM, 143, "terminated"),
        pytest.param(signal.SIGINT, 130, "interrupted", marks=pytest.mark.slow),
    ],
)
def test_the_command_tells_when_it_is_ready_and_ends_with_its_signal(tiny, number, code, word):
    words = ["serve", str(tiny.folder / "nova.kvcq"), "--model", str(tiny.model), "--port", "0", "--memory", "64M"]
    process: Forked | subprocess.Popen[bytes]
    if number == signal.SIGINT:
        process = Forked([*words, "--json"], bare_environment())
    else:
        command = [sys.executable, "-m", "kvcq", *words, "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=bare_environment())
    ready = json.loads(process.stdout.readline())
    body = {"model": ready["model"], "prompt": "a", "max_tokens": 3}
    assert httpx2.post(f"{ready['url']}/v1/completions", json=body, timeout=60).status_code == 200
    with httpx2.stream(
        "POST", f"{ready['url']}/v1/completions", json=body | {"max_tokens": 40, "stream": True}
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        process.send_signal(number)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    rest, lines = process.communicate(timeout=60)
    told = lines.decode()
    assert process.returncode == code and rest == b""
    assert told.splitlines()[-1] == f"error: {word}: the server has shut down, 2 answers given"
    table = {line.partition(":")[0]: line for line in told.splitlines()}
    assert "nova.kvcq, nova, digest" in table["bundle"] and "192 bytes a token, 1024 in BF16" in table["cache"]
    assert table["layers"] == "layers: 0-3 (full): K group_vq 2 bit metric, V uniform 2 bit orthogonal"
    assert "active" in table["canary"] and "Traceback" not in told
    assert table["kernels"].startswith("kernels: torch for 4 layers (the model is on cpu)")
