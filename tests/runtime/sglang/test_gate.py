"""A gate answers 503 to everybody without the token until it is opened, and is not there afterwards."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from kvcq.errors import MismatchError
from kvcq.runtime.sglang import gate
from kvcq.runtime.sglang.gate import HEADER, OPEN, Gate, lock_of, place

TOKEN = "7" * 64
CARRIED = [(HEADER.encode(), TOKEN.encode())]


class Behind:
    """An app that notes what reaches it, by identity."""

    def __init__(self):
        self.calls = []

    async def __call__(self, scope, receive, send):
        self.calls.append((scope, receive, send))


def ask(app, scope):
    """Run an app on one scope; return what it sent."""
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, None, send))
    return sent


def http(path="/health", method="GET", headers=()):
    return {"type": "http", "method": method, "path": path, "headers": list(headers)}


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/generate", "/metrics", "/server_info", OPEN])
@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(HEADER.encode(), b"8" * 64)],
        [(HEADER.encode(), b"")],
        [(HEADER.encode(), b"\xff")],
        [(HEADER.encode(), lock_of(TOKEN).encode())],
        [*CARRIED, *CARRIED],
        [(b"authorization", TOKEN.encode())],
    ],
)
def test_without_the_token_nothing_is_answered_or_opened(path, headers):
    behind = Behind()
    shut = Gate(behind, lock_of(TOKEN))
    for method in ("GET", "POST", "OPTIONS"):
        start, body = ask(shut, http(path, method, headers))
        assert start["status"] == 503 and (b"retry-after", b"5") in start["headers"]
        assert (b"content-length", str(len(body["body"])).encode()) in start["headers"]
        assert body["body"].endswith(b"\n") and json.loads(body["body"])["error"]["message"] == "not proven yet"
    assert not behind.calls and not shut.opened


def test_who_has_the_token_is_answered_and_nobody_behind_sees_it():
    behind = Behind()
    shut = Gate(behind, lock_of(TOKEN))
    assert ask(shut, http(headers=[(b"host", b"x"), *CARRIED])) == []
    assert behind.calls[0][0] == http(headers=[(b"host", b"x")])
    ask(shut, http(OPEN, "GET", CARRIED))
    assert not shut.opened


def test_once_opened_everything_passes_as_it_came():
    behind = Behind()
    opened = Gate(behind, lock_of(TOKEN))
    start, body = ask(opened, http("/root" + OPEN, "POST", CARRIED))
    assert (start["status"], json.loads(body["body"])) == (200, {"open": True}) and not behind.calls
    for scope in (http(), http(OPEN, "POST", CARRIED), {"type": "websocket", "path": "/", "headers": []}):
        assert ask(opened, scope) == []
        assert behind.calls[-1][0] is scope


def test_the_lifespan_passes_and_a_websocket_waits_for_the_proof():
    behind = Behind()
    shut = Gate(behind, lock_of(TOKEN))
    scope = {"type": "lifespan"}
    assert ask(shut, scope) == [] and behind.calls[0][0] is scope
    (closed,) = ask(shut, {"type": "websocket", "path": OPEN, "headers": []})
    assert closed["type"] == "websocket.close" and len(behind.calls) == 1
    ask(shut, {"type": "websocket", "path": OPEN, "headers": CARRIED})
    assert len(behind.calls) == 2 and not shut.opened


def make_module(**members):
    app = FastAPI()

    @app.get("/health")
    def health():
        return {}

    @app.get("/stream")
    def stream():
        return StreamingResponse(f"data: {i}\n\n" for i in range(3))

    return SimpleNamespace(app=app, **members)


ARGS = SimpleNamespace(tokenizer_worker_num=1, enable_http2=False, grpc_mode=False, grpc_port=40000)


def test_a_placed_gate_is_outside_of_middleware_that_is_added_later():
    module, seen = make_module(), []
    place(module, ARGS, lock_of(TOKEN))
    place(module, ARGS, lock_of(TOKEN))

    @module.app.middleware("http")
    async def later(request, following):
        seen.append(request.url.path)
        return await following(request)

    async def run():
        transport = httpx2.ASGITransport(app=module.app)
        carried = {HEADER: TOKEN}
        async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
            assert (await client.get("/health")).status_code == 503 and not seen
            assert (await client.get("/health", headers=carried)).json() == {}
            assert (await client.get("/stream", headers={HEADER: "8"})).headers["retry-after"] == "5"
            assert (await client.post(OPEN, headers=carried)).json() == {"open": True}
            assert (await client.get("/stream")).text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
            assert (await client.post(OPEN)).status_code == 404
        assert seen == ["/health", "/stream", OPEN]

    asyncio.run(run())


def started():
    module = make_module()
    module.app.middleware_stack = module.app.build_middleware_stack()
    return module


@pytest.mark.parametrize(
    ("module", "flags", "words"),
    [
        (make_module, {"tokenizer_worker_num": 2}, "--tokenizer-worker-num listens"),
        (make_module, {"enable_http2": True}, "--enable-http2 listens"),
        (make_module, {"smg_grpc_mode": True}, "--smg-grpc-mode listens"),
        (lambda: make_module(**{gate.NATIVE: print}), {"grpc_port": 9}, "--grpc-port listens"),
        (started, {}, "has started"),
        (lambda: SimpleNamespace(app=object()), {}, "built in another way"),
        (SimpleNamespace, {}, "built in another way"),
    ],
)
def test_where_it_does_not_fit_there_is_no_server(module, flags, words):
    with pytest.raises(MismatchError, match=words) as error:
        place(module(), SimpleNamespace(**vars(ARGS) | flags), lock_of(TOKEN))
    assert "is not in place" in str(error.value) and error.value.exit_code == 5
