"""The small SGLang and the names that the plugin reads, held against the sources of every release."""

from __future__ import annotations

import inspect
import pkgutil

from tests.runtime.sglang import small


def test_every_release_tells_the_ranks_of_attention(sources):
    context = "sglang.srt.runtime_context"
    if sources.has(context):
        assert sources.parameters(f"{context}.get_parallel") == []
        for name in ("attn_tp_size", "attn_tp_rank"):
            assert sources.function(f"{context}.ParallelContext.{name}").decorator_list
    else:
        for name in ("get_attention_tp_size", "get_attention_tp_rank"):
            assert sources.parameters(f"sglang.srt.layers.dp_attention.{name}") == []


def test_what_is_read_of_the_arguments_of_a_scheduler_is_in_every_release(sources):
    read = {"chunked_prefill_size", "enable_metrics", "max_running_requests"}
    assert read <= set(sources.fields("sglang.srt.server_args.ServerArgs"))


def test_the_small_sglang_has_the_parameters_of_the_real_one(sources, monkeypatch):
    small.install(monkeypatch, sources.version)
    for target in small.SIGNATURES:
        live = pkgutil.resolve_name(target)
        wanted = [name for name in sources.parameters(target) if name != "self"]
        found = [name for name in inspect.signature(live).parameters if name not in ("self", "kwargs")]
        # Later releases add parameters with defaults at the end.
        assert inspect.isbuiltin(live) or found == wanted[: len(found)], target
