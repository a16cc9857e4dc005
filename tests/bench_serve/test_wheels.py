"""What the bench asks of SGLang and reads from it, by name in the sources of every supported release."""

from __future__ import annotations

import re

import pytest

from tests.runtime.sglang.wheels import VERSIONS, Sources

pytestmark = pytest.mark.network


@pytest.fixture(params=VERSIONS)
def sources(request):
    return Sources(request.param)


def test_requests_and_answers_have_the_names_that_are_used(sources):
    server = sources.text("sglang.srt.entrypoints.http_server")
    for route in ("/flush_cache", "/start_profile", "/server_info", "/generate"):
        assert f'"{route}"' in server
    manager = sources.text("sglang.srt.managers.tokenizer_manager")
    for name in ("completion_tokens", "cached_tokens", "prompt_tokens"):
        assert f'"{name}"' in manager
    structures = sources.text("sglang.srt.managers.io_struct")
    body = re.search(r"^class ProfileReq(?:Input)?\(.*?(?=^class |^@)", structures, re.MULTILINE | re.DOTALL)[0]
    for name in ("output_dir", "num_steps", "activities", "with_stack", "record_shapes"):
        assert re.search(rf"^    {name}: ", body, re.MULTILINE), name


def test_a_server_tells_its_backend_and_its_capacity(sources):
    scheduler = sources.text("sglang.srt.managers.scheduler")
    assert "def get_internal_state" in scheduler and "token_capacity" in scheduler
    arguments = sources.text("sglang.srt.server_args")
    for name in ("attention_backend", "kv_cache_dtype", "max_running_requests", "load_format"):
        assert re.search(rf"^    {name}: ", arguments, re.MULTILINE), name
    assert '"--cuda-graph-max-bs"' in arguments


def test_the_bf16_pool_has_rows_to_fill(sources):
    pool = sources.text("sglang.srt.mem_cache.memory_pool")
    assert "self.k_buffer = [" in pool and "self.v_buffer = [" in pool
