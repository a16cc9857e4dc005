"""OpenAI's client against ``kvcq serve`` as a process, on a real model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.chain import bare_environment
from tests.e2e.conftest import Quickstart

pytestmark = [pytest.mark.slow, pytest.mark.network]

MODEL = "smollm2-135m"
FRANCE = "The capital of France is"


@pytest.fixture(scope="module")
def ready(quick: Quickstart, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the server says when it is ready; at the end it must end as it was told to."""
    told = tmp_path_factory.mktemp("serve") / "stderr"
    words = ["serve", quick.answer["bundle"], "--model", MODEL, "--port", "0", "--max-context", "4k", "--json"]
    with told.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvcq", *words],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=bare_environment(),
            text=True,
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, told.read_text()
        yield json.loads(line) | {"stderr": told}
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert "the server has shut down" in told.read_text() and "Traceback" not in told.read_text()


@pytest.fixture
def client(ready: dict[str, Any]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{ready['url']}/v1", api_key="none", max_retries=0, timeout=300)


def test_the_server_says_what_it_has_proven(ready: dict[str, Any], quick: Quickstart) -> None:
    assert ready["digest"] == quick.answer["digest"] and 0.9 < ready["canary"] < 1.1
    told = Path(ready["stderr"]).read_text()
    assert "3600 bytes a token, 23040 in BF16" in told and "0-29 (full): K group_vq 2 bit metric" in told


def test_completions_are_sensible_and_repeat(client: openai.OpenAI) -> None:
    first, second = (
        client.completions.create(model=MODEL, prompt=FRANCE, max_tokens=8, temperature=0) for _ in range(2)
    )
    assert "Paris" in first.choices[0].text and first.choices[0].text == second.choices[0].text
    assert first.usage is not None and first.usage.completion_tokens == 8


def test_chats_stream(client: openai.OpenAI) -> None:
    turns: Any = [{"role": "user", "content": "What is the capital of France?"}]
    options: dict[str, Any] = {"model": MODEL, "messages": turns, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0].message.content
    parts = client.chat.completions.create(**options, stream=True)
    assert "Paris" in whole and "".join(part.choices[0].delta.content or "" for part in parts) == whole


def test_a_long_prompt_is_read_through_the_codes_beside_others(client: openai.OpenAI) -> None:
    """The fact lies between the windows, so it is read from 2-bit rows; short requests run in between."""
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    prompt = noise * 12 + "The secret word is walnut. " + noise * 16 + "The secret word is"
    found: list[str] = []

    def run() -> None:
        found.append(client.completions.create(model=MODEL, prompt=FRANCE, max_tokens=6, temperature=0).choices[0].text)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=3, temperature=0)
    for thread in threads:
        thread.join()
    assert "walnut" in answer.choices[0].text
    assert answer.usage is not None and answer.usage.prompt_tokens > 600
    assert len(found) == 3 and len(set(found)) == 1 and "Paris" in found[0]


def test_models_health_and_metrics(client: openai.OpenAI, ready: dict[str, Any]) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert httpx2.get(f"{ready['url']}/health").json()["digest"] == ready["digest"]
    text = httpx2.get(f"{ready['url']}/metrics").text
    assert "kvcq_bytes_per_token 3600.0" in text and f'digest="{ready["digest"]}"' in text
    assert "kvcq_clamped_values_total 0.0" in text and "kvcq_cache_bytes 0.0" in text


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.BadRequestError, match="4096 tokens"):
        client.completions.create(model=MODEL, prompt=FRANCE, max_tokens=5000)
