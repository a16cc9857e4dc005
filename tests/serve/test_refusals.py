"""What a server refuses, and what it says."""

from __future__ import annotations

import asyncio

import openai
import pytest

from kvcq.runtime.hf.api.body import MOST_BYTES, BodyLimit

CHAT = "/v1/chat/completions"
TURN = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "."}, "suffix"),
        ({"min_p": 0.1}, "min_p"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 50}, "logprobs"),
        ({"prompt": [5] * 600}, "prompt"),
        ({"prompt": [5, 128]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"max_tokens": 511}, "prompt"),
        ({"model": None}, "model"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 300}, "stop"),
    ],
    ids=str,
)
def test_fields_that_cannot_be_honoured_are_named(served, body, param):
    answer = served.post(**body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and error["type"] == "invalid_request_error"
    assert param in error["message"] or error["code"] == "context_length_exceeded" or param == "prompt"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": TURN, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": TURN, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools"),
        ({"messages": TURN, "echo": True}, "echo"),
        ({"messages": TURN, "max_completion_tokens": 9999}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
    ],
    ids=str,
)
def test_chats_are_checked_too(served, body, param):
    answer = served.http.post(CHAT, json={"model": "tiny"} | body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_a_text_that_is_too_long_is_not_read_to_its_end(served):
    answer = served.post(prompt="the river " * 300_000)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def test_neutral_values_pass(served):
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "tools": [],
        "best_of": 1,
        "suffix": "",
    }
    assert served.post(max_tokens=1, **neutral).status_code == 200


def test_pictures_are_refused(served):
    turns = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]
    answer = served.http.post(CHAT, json={"model": "tiny", "messages": turns})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages.0.content"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": "tiny", "prompt": "\\ud800"}', b"[" * 5000, b'{"a":1'],
)
def test_bodies_that_are_no_request_are_400(served, content):
    answer = served.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"].rpartition("the body")[1]


def test_a_web_page_cannot_post_without_asking_first(served):
    """Browsers send text/plain across origins unasked; JSON needs a permission that this server never gives."""
    content = b'{"model": "tiny", "prompt": "a", "max_tokens": 1}'
    assert (
        served.http.post("/v1/completions", content=content, headers={"content-type": "text/plain"}).status_code == 400
    )
    asked = {
        "origin": "http://x",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type",
    }
    assert "access-control-allow-origin" not in served.http.options("/v1/completions", headers=asked).headers


def test_half_surrogates_in_extra_fields_are_400(served):
    turn = b'{"role": "user", "content": "a", "name": "\\ud800"}, {"role": "\\ud800", "content": "x"}'
    content = b'{"model": "tiny", "messages": [' + turn + b"]}"
    answer = served.http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400


def test_a_big_body_is_413_and_read_no_further(served):
    answer = served.http.post("/v1/completions", content=b" " * (MOST_BYTES + 1))
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
    assert served.post(max_tokens=1).status_code == 200


def test_a_body_that_does_not_come_is_408():
    sent = []

    async def run():
        async def receive():
            await asyncio.sleep(60)

        async def send(message):
            sent.append(message)

        await BodyLimit(lambda *_: None, seconds=0.05)({"type": "http"}, receive, send)

    asyncio.run(run())
    assert sent[0]["status"] == 408


def test_unknown_models_paths_and_verbs(served):
    with pytest.raises(openai.NotFoundError) as refused:
        served.client.completions.create(model="gpt", prompt="x")
    assert refused.value.code == "model_not_found" and "tiny" in refused.value.message
    assert served.http.get("/v1/embeddings").json()["error"]["message"] == "Not Found"
    assert served.http.get("/v1/completions").status_code == 405
    assert served.http.get("/docs").status_code == served.http.get("/openapi.json").status_code == 404
