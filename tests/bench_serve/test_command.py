"""The command and the script as processes: what they print, their exit codes, and signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvcq.pipeline.bench_serve import run as home
from kvcq.pipeline.bench_serve.result import ServeBenchResult
from kvcq.pipeline.bench_serve.run import bench_serve
from kvcq.pipeline.sglang import client
from tests.bench_serve.test_parts import example
from tests.chain import bare_environment
from tests.forked import Forked
from tests.scripts import load_benchmark
from tests.serve_sglang.conftest import MACHINE, OFTEN, ROOT, STUB

SENDER = """
import signal
import sys
from kvcq.errors import Interrupted
from kvcq.pipeline.bench_serve.client import send
from kvcq.pipeline.bench_serve.prompts import body

def ended(number, _):
    signal.signal(number, signal.SIG_IGN)
    raise Interrupted(number)

for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, ended)
try:
    print("sending", flush=True)
    send(sys.argv[1], [body([1, 2], 3)])
except Interrupted as stop:
    sys.exit(stop.exit_code)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_streams_run_ends_them_once(number):
    with socket.socket() as listener:
        # It takes the request and never answers.
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        own = [sys.executable, "-c", SENDER, f"http://127.0.0.1:{listener.getsockname()[1]}"]
        with subprocess.Popen(own, cwd=ROOT, env=bare_environment(), stdout=subprocess.PIPE, text=True) as running:
            connection, _ = listener.accept()
            connection.recv(1 << 16)
            for _ in range(2):
                running.send_signal(number)
                time.sleep(0.01)
            assert running.wait(20) == 128 + number
            connection.close()


DRIVER = """
import sys
import kvcq.pipeline.bench_serve.run as home
from kvcq.cli.main import run
from tests.serve_sglang.conftest import MACHINE
home.this_machine = lambda: MACHINE
run()
"""


def command(*arguments, way="", fresh=False):
    """Run ``kvcq bench serve``, forked or by a fresh interpreter; return the exit code and both streams."""
    env = bare_environment(KVCQ_STUB=way) | {"PYTHONPATH": f"{STUB}{os.pathsep}{ROOT}"}
    words = ["bench", "serve", *arguments]
    if fresh:
        own = [sys.executable, "-c", DRIVER, *words]
        done = subprocess.run(own, env=env, capture_output=True, text=True, check=False, timeout=180, cwd=ROOT)
        return done.returncode, done.stdout, done.stderr
    process = Forked(words, env, prepare=on_a_gpu)
    out, err = process.communicate(timeout=180)
    return process.returncode, out.decode(), err.decode()


def on_a_gpu():
    home.this_machine = lambda: MACHINE
    client.POLL_SECONDS = OFTEN


def test_the_command_prints_tables_and_tells_what_failed(tmp_path):
    options = ("--synthetic", "qwen3-8b", "--layers", "1", "--cells", "1x256", "--output", "24", "--max-running", "4")
    more = ("--json", "--", "--log-level", "info")
    code, out, err = command(*options, "--bf16", "triton", "--kinds", "int2", *more, fresh=True)
    assert code == 0, err
    assert [row["arm"] for row in json.loads(out)["rows"]] == ["bf16-triton", "int2"]
    code, out, err = command(*options, "--bf16", "triton,flashinfer", "--kinds", "int2", "--quiet", way="no_flashinfer")
    assert code == 1 and "| 1x256 | bf16-triton |" in out
    assert err.splitlines()[-1].startswith("error: 1 without a figure, first bf16-flashinfer: ")
    code, out, _ = command("--model", "m", "--cells", "1x8k", "--dry-run")
    assert code == 0 and "bf16-triton, bf16-flashinfer" in out


SCRIPT = """
import runpy
import sys
import kvcq.pipeline.bench_serve.run as home
from tests.serve_sglang.conftest import MACHINE
home.this_machine = lambda: MACHINE
runpy.run_path("benchmarks/serve.py", run_name="__main__")
"""


def test_a_run_that_is_ended_leaves_no_server(tmp_path):
    out, pids = tmp_path / "serve.json", tmp_path / "pids"
    env = bare_environment(KVCQ_STUB="child", KVCQ_STUB_PID=str(pids)) | {"PYTHONPATH": f"{STUB}{os.pathsep}{ROOT}"}
    own = [sys.executable, "-c", SCRIPT, "first", "--layers", "1", "--kinds", "", "--bf16", "triton"]
    own += ["--cells", "1x1k,1x64k", "--splits", "", "--prompts", "", "--output", "9000", "--out", str(out)]
    with subprocess.Popen(own, env=env, cwd=ROOT, stderr=subprocess.PIPE, text=True) as running:
        end = time.monotonic() + 90
        while not pids.exists() and time.monotonic() < end and running.poll() is None:
            time.sleep(0.1)
        while not out.exists() and time.monotonic() < end and running.poll() is None:
            time.sleep(0.1)
        for _ in range(2):
            running.send_signal(signal.SIGTERM)
            time.sleep(0.02)
        told = running.communicate(timeout=30)[1]
    # The second one may find an interpreter that has no handlers any more.
    assert running.returncode in (128 + signal.SIGTERM, -signal.SIGTERM), told
    assert told.splitlines()[-1].startswith("error: terminated: ") and f"figures are in {out}" in told
    assert json.loads(out.read_text())["arms"][0]["name"] == "bf16-triton"
    for pid in map(int, pids.read_text().split()):
        assert not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text()


def test_a_refusal_of_the_script_is_one_line(tmp_path, capsys, monkeypatch):
    out = tmp_path / "serve.json"
    out.write_text("{}")
    monkeypatch.setattr(sys, "argv", ["serve.py", "job", "--jobs", "2x1k", "--out", str(out)])
    # A test leaves the handlers of its process alone.
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert load_benchmark(monkeypatch, "serve").main() == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and told[0].startswith("error: the output exists") and "--force" in told[0]


def test_targets_take_the_best_bundle_of_their_cell(monkeypatch, tmp_path, capsys):
    script = load_benchmark(monkeypatch, "serve")
    result = example()
    rows = [replace(row, cell="1x90k") if row.kind == "decode" and row.cell == "1x8k" else row for row in result.rows]
    result = ServeBenchResult(result.machine, result.model, {}, result.arms, rows)
    found = {(target.kind, target.goal): rest for target, *rest in script.reached(result)}
    assert found[("decode", 1.4)] == ["1x90k", "int2", 2.0, True]
    assert found[("decode", 2.0)] == ["1x90k", "int2", 2.5, True]
    assert found[("split", 1.15)] == ["1x8k", "int2", pytest.approx(1.1), True]
    assert len(found) == 3
    path = tmp_path / "r.json"
    path.write_text(json.dumps(result.payload()))
    (again,) = script.read_result([path])
    assert script.print_targets(again) and "| 1x90k | int2 | >= 1.4 | 2 |" in capsys.readouterr().out
    for name, request in script.RUNS.items():
        assert bench_serve(replace(request, dry_run=True)).plan, name
