"""Clients that leave, queues that fill, time that runs out, and the end of a server."""

from __future__ import annotations

import socket
import threading
import time

import httpx2
import openai
import pytest

from kvcq.runtime.hf.engine.engine import Engine
from tests.serve.conftest import serving

LONG = 450
# A random model may end its text at any token.
ENDLESS = {"ignore_eos": True}


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def cancelled(served):
    return served.metrics().get('kvcq_errors_total{kind="cancelled"}', 0)


def idle(served):
    found = served.metrics()
    return found["kvcq_requests_running"] == found["kvcq_requests_waiting"] == found["kvcq_cache_bytes"] == 0


def test_a_stream_that_is_closed_is_not_computed_further(served):
    before = cancelled(served)
    stream = served.complete(max_tokens=LONG, stream=True, extra_body=ENDLESS)
    next(iter(stream))
    stream.close()
    wait_for(lambda: cancelled(served) == before + 1)
    wait_for(lambda: idle(served))


def test_a_client_that_hangs_up_is_noticed_without_a_stream(served):
    before = cancelled(served)
    with pytest.raises(openai.APITimeoutError):
        served.client.with_options(timeout=0.3).completions.create(
            model="tiny", prompt="a", max_tokens=LONG, n=4, extra_body=ENDLESS
        )
    wait_for(lambda: cancelled(served) == before + 4)
    wait_for(lambda: idle(served))


def test_a_full_queue_is_429_with_a_time_to_retry(tiny):
    with serving(tiny, max_running=1, max_queue=1) as served:
        stream = served.complete(max_tokens=LONG, stream=True, extra_body=ENDLESS)
        next(iter(stream))
        waiting = threading.Thread(target=served.post, kwargs={"max_tokens": 1})
        waiting.start()
        wait_for(lambda: served.metrics()["kvcq_requests_waiting"] == 1)
        with pytest.raises(openai.RateLimitError) as refused:
            served.complete(max_tokens=1)
        assert refused.value.code == "queue_full" and int(refused.value.response.headers["retry-after"]) > 0
        assert "1 requests are running and 1 are waiting" in str(refused.value)
        # More than could ever be taken at once: to try again would be of no use.
        with pytest.raises(openai.BadRequestError, match="at most 2 choices at once"):
            served.complete(max_tokens=1, n=3)
        stream.close()
        waiting.join(30)
        assert served.complete(max_tokens=1).choices


def test_time_runs_out_as_504_and_in_a_stream_as_an_error(tiny):
    with serving(tiny, timeout=0.5) as served:
        answer = served.post(max_tokens=LONG, **ENDLESS)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        with pytest.raises(openai.APIError, match=r"within 0\.5 seconds"):
            list(served.complete(max_tokens=LONG, stream=True, extra_body=ENDLESS))
        assert served.complete(max_tokens=1).choices
    assert served.result.failed == {"timeout": 2} and served.result.done == {"length": 1}


def test_a_server_that_ends_lets_answers_finish(tiny):
    with serving(tiny) as served:
        stream = iter(served.complete(max_tokens=60, stream=True))
        next(stream)
        served.ready.stop(30)
        assert [part.choices[0].finish_reason for part in stream][-1] == "length"
        wait_for(lambda: refuses(served))
    assert served.result.done == {"length": 1} and not served.result.failed


def refuses(served):
    try:
        httpx2.get(f"{served.url}/health", timeout=5)
    except httpx2.HTTPError:
        return True
    return False


def test_a_server_that_must_end_says_so_in_the_stream(tiny):
    with serving(tiny) as served:
        stream = iter(served.complete(max_tokens=LONG, stream=True, extra_body=ENDLESS))
        next(stream)
        served.ready.stop(0)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
    assert served.result.failed == {"shutdown": 1}


def test_connections_that_send_nothing_or_nonsense_harm_nobody(served):
    address = served.url.removeprefix("http://").split(":")
    quiet = socket.create_connection((address[0], int(address[1])))
    noisy = socket.create_connection((address[0], int(address[1])))
    noisy.sendall(b"\x16\x03\x01 not HTTP at all\r\n\r\n")
    half = socket.create_connection((address[0], int(address[1])))
    half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    assert served.complete(max_tokens=1).choices
    for connection in (quiet, noisy, half):
        connection.close()
    assert served.complete(max_tokens=1).choices


def test_interleaved_clients_get_the_answers_of_single_ones(served):
    prompts = [f"the {word}" for word in ("island", "stone", "river", "sand", "answer", "other")]
    alone = [served.complete(prompt, max_tokens=15).choices[0].text for prompt in prompts]
    found = [None] * len(prompts)

    def run(number):
        stream = served.complete(prompts[number], max_tokens=15, stream=True)
        found[number] = "".join(part.choices[0].text for part in stream)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == alone


def test_an_engine_that_breaks_ends_the_server(tiny, monkeypatch):
    with serving(tiny) as served:
        monkeypatch.setattr(Engine, "_turn", broken)
        answer = served.post(max_tokens=5)
        assert answer.status_code == 500 and "the engine has stopped" in answer.json()["error"]["message"]
        wait_for(lambda: refuses(served))
    assert isinstance(served.result, SystemError)


def broken(*_):
    raise SystemError("a bug")
