from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest

from kvcq.errors import EvaluationError, InputError, KvcqError, UnavailableError
from kvcq.pipeline import server_client
from kvcq.pipeline.server_client import Reply, ServerClient, Wish, base_url
from tests.server.fake import Answerer, Fake, Fault, Raw, serve

WISH = Wish("tiny", 0.0, 16)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "PAUSE", 0.01)


def ask(fake: Fake | str, prompt: Any = "hello", wish: Wish = WISH, **options: Any) -> Reply:
    url = fake if isinstance(fake, str) else fake.url

    async def run() -> Reply:
        async with ServerClient("A", url, **({"retries": 2, "seconds": 5.0} | options)) as client:
            return await client.ask(prompt, 7, wish, "task, item 3")

    return asyncio.run(run())


def failure(answer: Answerer, **options: Any) -> tuple[KvcqError, Fake]:
    with serve(answer) as fake, pytest.raises(KvcqError) as told:
        ask(fake, **options)
    return told.value, fake


def once(fault: Fault | Raw) -> Answerer:
    """Fail at the first request, answer after it."""
    seen: list[str] = []

    def answer(prompt: str, _: dict[str, Any]) -> str | Fault | Raw:
        seen.append(prompt)
        return fault if len(seen) == 1 else "there"

    return answer


def test_a_chat_request_is_what_the_api_expects() -> None:
    with serve(lambda *_: "there") as fake:
        reply = ask(fake, wish=Wish("tiny", 0.5, 16, {"top_p": 0.9}), key="secret")
    assert reply == Reply("there", False, len("hello"), len("there"))
    assert fake.requests == [
        {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "temperature": 0.5, "max_tokens": 16,
         "seed": 7, "stream": False, "top_p": 0.9}
    ]  # fmt: skip
    assert fake.headers[0]["Authorization"] == "Bearer secret"


def test_completions_send_text_or_tokens_raw() -> None:
    with serve(lambda *_: "there") as fake:
        assert ask(fake, api="completions").text == ask(fake, (1, 2), api="completions").text == "there"
    assert [request["prompt"] for request in fake.requests] == ["hello", [1, 2]]


def test_messages_are_sent_as_they_are() -> None:
    messages = ({"role": "system", "content": "short"}, {"role": "user", "content": "hi"})
    with serve(lambda *_: "there") as fake:
        ask(fake, messages)
    assert fake.requests[0]["messages"] == list(messages)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(500), Fault(503, b"busy"), Fault(429, headers={"Retry-After": "0"}), Fault(200, b"{not json"),
        Fault(200, b'{"choices": []}'), Fault(200, b"[]"), Fault(cut=True), Raw("x", None), Raw("x", "abort"),
        Raw("", "stop"), Raw(None, "stop"), Raw("x", "content_filter"),
    ],
)  # fmt: skip
def test_what_may_pass_is_tried_again(fault: Fault | Raw) -> None:
    with serve(once(fault)) as fake:
        assert ask(fake).text == "there"
    assert len(fake.requests) == 2


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (Fault(500), "HTTP 500: out of luck, in 3 attempts"), (Fault(502, b"<html>"), "HTTP 502: Bad Gateway"),
        (Fault(200, b"{not json"), "not JSON"), (Fault(200, b'{"choices": []}'), "no choice"),
        (Raw("x", "content_filter"), "'content_filter'"), (Raw(None, "tool_calls"), "'tool_calls'"),
        (Raw("  ", "stop"), "an empty answer"), (Fault(cut=True), "broken connection"),
    ],
)  # fmt: skip
def test_no_failure_becomes_an_answer(fault: Fault | Raw, told: str) -> None:
    error, fake = failure(lambda *_: fault)
    assert isinstance(error, EvaluationError) and error.exit_code == 1 and len(fake.requests) == 3
    assert told in str(error) and "server A, task, item 3" in str(error)


@pytest.mark.parametrize(
    ("status", "fix"), [(400, "--max-tokens"), (401, "--api-key-file"), (403, "--api-key-file"), (422, "--body")]
)
def test_a_refusal_is_final(status: int, fix: str) -> None:
    error, fake = failure(lambda *_: Fault(status, b'{"detail": "no \\u001b[31m way"}'))
    assert len(fake.requests) == 1 and f"HTTP {status}: no \\x1b[31m way" in str(error) and fix in str(error)


def test_an_unknown_model_and_an_unknown_path_are_told_apart() -> None:
    error, _ = failure(lambda *_: Fault(404, b'{"error": {"message": "no model tiny"}}'))
    assert "no model tiny" in str(error) and "--served-model" in str(error)
    with serve(lambda *_: "x") as fake, pytest.raises(EvaluationError, match="the server has no /chat/completions"):
        ask(fake.url + "/other")


def test_time_limits_end_an_attempt() -> None:
    started = time.monotonic()
    error, fake = failure(lambda *_: Fault(pause=1.0), seconds=0.2, retries=1)
    assert "no complete answer within 0.2 s, in 2 attempts" in str(error) and len(fake.requests) == 2
    assert time.monotonic() - started < 4


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(UnavailableError, match="start the server") as told:
        ask(f"http://127.0.0.1:{port}")
    assert told.value.exit_code == 7 and "item 3" in str(told.value)


def test_a_cut_answer_counts_as_cut_even_if_empty() -> None:
    for text in ("half an ans", "", None):
        with serve(lambda *_, text=text: Raw(text, "length")) as fake:
            reply = ask(fake)
        assert reply.truncated and reply.text == (text or "") and len(fake.requests) == 1


def test_empty_answers_count_only_when_allowed() -> None:
    with serve(lambda *_: Raw("", "stop")) as fake:
        assert ask(fake, wish=Wish("tiny", 0, 16, allow_empty=True)).text == ""


def test_text_that_no_file_could_hold_is_made_whole() -> None:
    with serve(lambda *_: "a\ud800b") as fake:
        assert ask(fake).text == "a?b"


def test_models_are_listed_and_a_server_without_a_list_is_no_error() -> None:
    async def models(url: str) -> tuple[str, ...]:
        async with ServerClient("A", url, retries=0) as client:
            return await client.models()

    with serve(lambda *_: "x", models=("one", "two")) as fake:
        assert asyncio.run(models(fake.url)) == ("one", "two")
        assert asyncio.run(models(fake.url + "/none")) == ()


@pytest.mark.parametrize(
    ("text", "url"),
    [("http://h:1", "http://h:1/v1"), ("http://h:1/", "http://h:1/v1"), ("https://h/x/v1/", "https://h/x/v1")],
)
def test_the_api_lies_below_v1_unless_a_path_is_given(text: str, url: str) -> None:
    assert str(base_url(text)) == url


@pytest.mark.parametrize(
    "text", ["", "localhost:3", "ftp://h", "http://", "http://u:p@h", "http://h?k=v", "http://h:x"]
)
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        base_url(text)
