"""The command as a process: signals, exit codes, and that no server is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvcq.pipeline.serve_sglang as home
from kvcq.pipeline.sglang import client
from kvcq.runtime.sglang.settings import Settings
from tests.chain import bare_environment
from tests.forked import Forked
from tests.serve_sglang.conftest import MACHINE, OFTEN, ROOT, STUB, argv_of, gone

DRIVER = Path(__file__).parent / "driver.py"


@contextmanager
def command(tiny, tmp_path, way, *more, fresh=False):
    """Run ``kvcq serve --engine sglang`` against the stub; yield the process, forked or a fresh interpreter."""
    environment = bare_environment(
        KVCQ_STUB=way, KVCQ_STUB_PID=str(tmp_path / "pids"), KVCQ_STUB_LOG=str(tmp_path / "argv")
    )
    environment["PYTHONPATH"] = f"{STUB}{os.pathsep}{ROOT}"
    options = ("--model", str(tiny.model), "--engine", "sglang", "--dtype", "bfloat16", "--port", "0", "--json")
    words = ("serve", str(tiny.folder / "nova.kvcq"), *options, *more)
    if fresh:
        pipe = subprocess.PIPE
        process = subprocess.Popen([sys.executable, str(DRIVER), *words], env=environment, stdout=pipe, stderr=pipe)
    else:
        process = Forked(words, environment, prepare=on_a_gpu)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def on_a_gpu():
    home.this_machine = lambda: MACHINE
    client.POLL_SECONDS = OFTEN


def end(process, number):
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err.decode()


def all_gone(tmp_path):
    return gone((tmp_path / "pids").read_text().split())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_server_and_is_the_exit_code(tiny, tmp_path, number, code):
    own = ("--trace", str(tmp_path / "t.jsonl"), "--sink-entries", "3")
    flags = (*own, "--", "--log-level", "info")
    with command(tiny, tmp_path, "child", *flags, fresh=number == signal.SIGTERM) as process:
        told = json.loads(process.stdout.readline())
        assert told["engine"] == "sglang"
        assert not (set(told) & {"api_key"})
        argv = argv_of(tmp_path / "argv")
        assert argv[:2] == ["--log-level", "info"]
        settings = json.loads(argv[argv.index("--json-model-override-args") + 1])["kvcq"]
        assert settings == {
            "bundle": str(tiny.folder / "nova.kvcq"),
            "digest": told["digest"],
            "trace": str(tmp_path / "t.jsonl"),
            "sink_entries": 3,
            "gate": settings["gate"],
        }
        assert Settings.of(settings).plain() == settings
        found, out, err = end(process, number)
    assert (found, out) == (code, b"")
    assert err.strip().splitlines()[-1].endswith("the server has shut down")
    assert "ended" in err.splitlines()  # it was asked, not killed
    assert all_gone(tmp_path)


def test_a_signal_while_the_server_starts_ends_it_too(tiny, tmp_path):
    with command(tiny, tmp_path, "hang", "--grace", "0") as process:
        for line in process.stderr:
            if b"starting SGLang" in line:
                break
        time.sleep(1.0)
        found, _, err = end(process, signal.SIGTERM)
    assert (found, err.count("\n")) == (143, 1)


def test_a_second_signal_does_not_wait(tiny, tmp_path):
    with command(tiny, tmp_path, "stubborn", "--grace", "600") as process:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        for line in process.stderr:
            if b"a second signal ends it at once" in line:
                break
        time.sleep(0.3)
        begun = time.monotonic()
        found, _, _ = end(process, signal.SIGINT)
        assert time.monotonic() - begun < 30
    assert found == 143


def test_a_server_that_does_not_end_in_time_is_killed(tiny, tmp_path):
    with command(tiny, tmp_path, "stubborn", "--grace", "0.5") as process:
        process.stdout.readline()
        found, _, _ = end(process, signal.SIGTERM)
    assert found == 143


def test_the_exit_code_of_the_server_is_that_of_the_command(tiny, tmp_path):
    with command(tiny, tmp_path, "crash_later", "--quiet") as process:
        process.stdout.readline()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 9
    assert err.decode().splitlines()[-1].startswith("warning: SGLang ended with exit code 9")


@pytest.mark.parametrize(("way", "code"), [("bf16", 5), ("no_plugin", 5), ("unknown_flag", 2), ("memory", 6)])
def test_what_fails_is_one_line_and_a_code(tiny, tmp_path, way, code):
    with command(tiny, tmp_path, way, "--quiet") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, b"")
    lines = err.decode().splitlines()
    # Besides it, quiet leaves only the warnings, e.g. of a context beyond the one fitted for.
    assert lines[-1].startswith("error: ")
    assert all(line.startswith("warning: ") for line in lines[:-1])
