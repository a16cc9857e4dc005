from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcq.pipeline.serve_sglang import serve_sglang
from kvcq.pipeline.sglang import client
from kvcq.pipeline.sglang.machine import Gpu, Machine
from kvcq.pipeline.sglang.request import SglangRequest
from tests.background import in_background
from tests.chain import make_world

STUB = Path(__file__).parent / "stub"
ROOT = Path(__file__).resolve().parents[2]
# Seconds between questions whether a server is well: the stub is at the second one.
OFTEN = 0.05
MACHINE = Machine("0.5.15.post1", (Gpu("NVIDIA H200", 140 << 30, (9, 0)), Gpu("NVIDIA H200", 140 << 30, (9, 0))))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A model and a bundle of nova for it."""
    world = make_world(tmp_path_factory.mktemp("sglang") / "world", ("nova",))
    world.pack("nova", world.folder / "nova.kvcq")
    return world


@pytest.fixture
def stub(monkeypatch):
    """Let child processes find the stub in place of SGLang; call it to choose how it behaves."""
    monkeypatch.setenv("PYTHONPATH", f"{STUB}{os.pathsep}{ROOT}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("KVCQ_STUB", raising=False)
    monkeypatch.setattr(client, "POLL_SECONDS", OFTEN)

    def choose(way="", **more):
        monkeypatch.setenv("KVCQ_STUB", way)
        for name, value in more.items():
            monkeypatch.setenv(f"KVCQ_STUB_{name.upper()}", str(value))

    return choose


class Told:
    """A reporter that remembers."""

    def __init__(self):
        self.notes, self.warnings, self.stages = [], [], []

    @property
    def ready(self):
        return self.running.ready

    @property
    def code(self):
        return self.running.result

    def stage(self, text):
        self.stages.append(text)

    def advance(self, done, total, unit):
        pass

    def note(self, text):
        self.notes.append(text)

    def warn(self, text):
        self.warnings.append(text)


def request_of(tiny, *arguments, **options):
    defaults = {
        "bundle": tiny.folder / "nova.kvcq",
        "model": str(tiny.model),
        "dtype": "bfloat16",
        "port": 0,
        "max_running": 4,
        "grace": 5.0,
        "start_seconds": 60.0,
        "arguments": arguments,
    }
    return SglangRequest(**defaults | options)


@contextmanager
def serving(tiny, *arguments, **options):
    """Run ``kvcq.serve_sglang`` in a thread; yield what was told, and afterwards its exit code in `code`."""
    told, request = Told(), request_of(tiny, *arguments, **options)
    with in_background(lambda on_ready: serve_sglang(request, told, on_ready, machine=MACHINE), 5.0) as running:
        told.running = running
        yield told


def alive(pid):
    """Tell whether a process runs; one that waits for its parent to notice its end does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids, seconds=10.0):
    """Tell whether processes end; one that was killed is there until the system has taken it down."""
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


def argv_of(log):
    return json.loads(Path(log).read_text())
