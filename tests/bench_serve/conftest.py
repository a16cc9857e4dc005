from __future__ import annotations

import json

import pytest

from kvcq.pipeline.bench_serve.request import ServeBenchRequest
from kvcq.pipeline.bench_serve.run import bench_serve
from tests.bench_serve.traces import make_events
from tests.serve_sglang.conftest import MACHINE, Told, stub, tiny

__all__ = ["stub", "tiny"]


@pytest.fixture
def run(stub, tmp_path, monkeypatch):
    """Run a bench against the stub, which behaves as `way` says; return the result and what was told."""
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": make_events()}))
    monkeypatch.setenv("KVCQ_STUB_TRACE", str(trace))

    def go(way="", **options):
        stub(way)
        defaults = {
            "synthetic": "qwen3-8b",
            "layers": 1,
            "kinds": ("int2",),
            "bf16": ("triton",),
            "output": 24,
            "job_output": 24,
            "max_running": 8,
            "start_seconds": 60.0,
        }
        told = Told()
        return bench_serve(ServeBenchRequest(**defaults | options), told, machine=MACHINE), told

    return go
