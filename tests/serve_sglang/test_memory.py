from __future__ import annotations

import json

import pytest

from kvcq.artifacts.bundle import open_bundle
from kvcq.errors import MismatchError
from kvcq.pipeline.sglang.arguments import read_given
from kvcq.pipeline.sglang.machine import Gpu
from kvcq.pipeline.sglang.memory import plan_memory
from kvcq.pipeline.sglang.proof import check_record
from kvcq.runtime.layout import kv_bytes_per_token, window_bytes
from kvcq.runtime.sglang.metrics import Facts, Meters

GPU = Gpu("NVIDIA H200", 1 << 30, (9, 0))


@pytest.fixture(scope="module")
def bundle(tiny):
    return open_bundle(tiny.folder / "nova.kvcq")


def memory_of(bundle, *tokens, weights=1 << 20):
    return plan_memory(bundle, read_given(tokens), 4, GPU, weights)


def facts(memory, bundle, **changes):
    """What the plugin publishes for this bundle."""
    pool, manifest = memory.pool, bundle.manifest
    plain = {
        "digest": manifest.digest,
        "method": manifest.recipe.method,
        "kvcq": "0",
        "sglang": "0.5.15.post1",
        "bytes_per_token": pool.cell,
        "window_bytes": pool.request_bytes,
        "capacity": 6400,
        "running": pool.requests,
        "sinks": pool.entries,
        "rank": 0,
        "ranks": memory.ranks,
        "kernels": {entry.layer: "cuda" for entry in manifest.plan},
    }
    return Facts(**plain | changes)


def test_the_plan_is_that_of_the_layout(bundle):
    memory, manifest = memory_of(bundle), bundle.manifest
    assert memory.pool.cell == kv_bytes_per_token(manifest.plan, manifest.geometry)
    assert memory.pool.request_bytes == window_bytes(manifest.plan, manifest.geometry, manifest.recipe.windows)
    assert memory.bf16_cell == kv_bytes_per_token((), manifest.geometry)
    assert memory.available == int(GPU.memory * 0.85) - (1 << 20)
    assert memory.tokens % 64 == 0
    assert 0 <= memory.bf16_tokens - memory.beside(memory.tokens) <= 64
    assert f"about {memory.tokens} tokens" in memory.line()


def test_each_kept_beginning_takes_the_bytes_of_its_exact_rows(bundle):
    few, many = (plan_memory(bundle, read_given([]), 4, GPU, 1 << 20, entries).pool for entries in (1, 11))
    assert memory_of(bundle).pool.entries == 4 and (few.entries, many.entries) == (1, 11)
    sinks = bundle.manifest.recipe.windows.sink * kv_bytes_per_token((), bundle.manifest.geometry)
    assert many.bias - few.bias == 10 * sinks


def test_ranks_share_weights_and_heads(bundle):
    one, two = memory_of(bundle), memory_of(bundle, "--tp", "2", "--mem-fraction-static", "0.5")
    assert (2 * two.pool.cell, 2 * two.bf16_cell) == (one.pool.cell, one.bf16_cell)
    assert two.available == GPU.memory // 2 - (1 << 19)


def test_without_weights_nothing_is_promised(bundle):
    memory = memory_of(bundle, weights=0)
    assert (memory.tokens, memory.bf16_tokens) == (None, None)
    assert "not on this machine yet" in memory.line()


def test_what_the_plugin_publishes_is_what_the_proof_reads(bundle):
    memory = memory_of(bundle)
    told = json.loads(json.dumps(Meters(facts(memory, bundle)).plain()))
    check_record(told, bundle, memory)


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "0" * 64},
        {"bytes_per_token": 1},
        {"window_bytes": 1},
        {"running": 5},
        {"ranks": 2},
        {"capacity": 0},
        {"kernels": {}},
    ],
)
def test_every_number_of_a_scheduler_counts(bundle, changes):
    memory = memory_of(bundle)
    with pytest.raises(MismatchError):
        check_record(Meters(facts(memory, bundle, **changes)).plain(), bundle, memory)


def test_a_fallback_is_no_proof(bundle):
    memory = memory_of(bundle)
    meters = Meters(facts(memory, bundle))
    meters.fallback("no room")
    with pytest.raises(MismatchError, match="without the kernels"):
        check_record(meters.plain(), bundle, memory)
