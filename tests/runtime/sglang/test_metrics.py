from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from kvcq.runtime.sglang import metrics
from tests.chain import python

FACTS = {
    "digest": "d" * 64,
    "method": "nova",
    "kvcq": "0.1",
    "sglang": "0.5.15.post1",
    "bytes_per_token": 21504,
    "window_bytes": 1 << 20,
    "capacity": 6400,
    "running": 64,
    "sinks": 128,
    "rank": 1,
    "ranks": 2,
    "kernels": {0: "cuda", 3: "torch"},
}

COLLECT = f"""
import sys
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from kvcq.runtime.sglang import metrics
meters = metrics.publish(metrics.Facts(**{FACTS!r}), metrics=True)
meters.occupancy(3, 2, 7)
meters.clamp(5)
meters.clamp(4)
meters.fallback("no room")
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
sys.stdout.write(generate_latest(registry).decode())
"""


@pytest.fixture(autouse=True)
def nothing_published():
    yield
    metrics._published.clear()


def test_a_scheduler_without_the_plugin_reports_nothing():
    state = SimpleNamespace(internal_state={"a": 1})
    assert metrics.report(state, object(), object()) is state
    assert state.internal_state == {"a": 1}


def test_a_scheduler_reports_what_it_serves_and_counts():
    meters = metrics.publish(metrics.Facts(**FACTS), metrics=False)
    meters.occupancy(3, 2, 7)
    meters.fallback("no room")
    meters.fallback("no room")
    state = metrics.report(SimpleNamespace(internal_state={}), object(), recv_req=object())
    told = json.loads(json.dumps(state.internal_state))[metrics.KEY]
    assert told == FACTS | {
        "kernels": {"0": "cuda", "3": "torch"},
        "rings": 3,
        "pinned": 2,
        "cached": 7,
        "clamped": 0,
        "fallbacks": {"layer 3": 1, "no room": 2},
    }


def test_gauges_reach_the_files_that_sglang_collects(tmp_path):
    done = python("-c", COLLECT, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    assert found == {
        f'kvcq_bundle_info{{digest="{FACTS["digest"]}",method="nova",rank="1"}}': 1,
        'kvcq_bytes_per_token{rank="1"}': 21504,
        'kvcq_capacity_tokens{rank="1"}': 6400,
        'kvcq_window_bytes{rank="1"}': 1 << 20,
        'kvcq_ring_rows{rank="1"}': 64,
        'kvcq_sink_entries{rank="1"}': 128,
        'kvcq_ring_rows_used{rank="1"}': 3,
        'kvcq_sink_entries_pinned{rank="1"}': 2,
        'kvcq_sink_entries_cached{rank="1"}': 7,
        'kvcq_clamped_values{rank="1"}': 5,
        'kvcq_fallbacks_total{rank="1",reason="none"}': 0,
        'kvcq_fallbacks_total{rank="1",reason="layer 3"}': 1,
        'kvcq_fallbacks_total{rank="1",reason="no room"}': 1,
    }


def test_importing_it_imports_no_prometheus():
    done = python("-c", "import sys, kvcq.runtime.sglang.metrics; print('prometheus_client' in sys.modules)")
    assert done.stdout.strip() == b"False"
