"""A gate in front of a server that has not proven itself yet: it answers nobody but who started it.

``kvcq serve`` draws a token and tells the server its SHA-256 alone, for arguments are seen by every user of a machine.
The gate lets through what carries the token, until a request with it opens the gate for good.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from kvcq.errors import MismatchError
from kvcq.runtime.sglang.versions import INSTEAD

HEADER = "x-kvcq-gate"
OPEN = "/kvcq/open"
REASON = "not proven yet"
RETRY_SECONDS = 5
# Fields of ServerArgs that make SGLang listen with something else than the app of the launcher, and what is legal.
ELSEWHERE = {
    "tokenizer_worker_num": 1,
    "enable_http2": False,
    "grpc_mode": False,
    "smg_grpc_mode": False,
    "encoder_only": False,
    "use_ray": False,
}
# What of SGLang's module starts a second listener, in the releases that can; others set its port and do nothing.
NATIVE = "_start_native_grpc_server_for_runtime"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def lock_of(token: str) -> str:
    """Return what a gate is told of its token: the SHA-256, 64 hex digits."""
    return hashlib.sha256(token.encode()).hexdigest()


class Gate:
    """ASGI middleware; once open it costs one test of an attribute.

    Args:
        app: What is behind it.
        lock: `lock_of` the token.
    """

    def __init__(self, app: App, lock: str) -> None:
        self.opened = False
        self._app, self._lock = app, lock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let through, open, or answer 503; a websocket is closed, which servers answer with 403."""
        if self.opened or scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif not self._fits(scope):
            await _turn_away(scope, send)
        elif scope["type"] == "http" and scope["method"] == "POST" and scope["path"].endswith(OPEN):
            self.opened = True
            await _answer(send, 200, {"open": True})
        else:
            # Nothing behind it needs the token, and something there may log headers.
            kept = [pair for pair in scope["headers"] if pair[0] != HEADER.encode()]
            await self._app({**scope, "headers": kept}, receive, send)

    def _fits(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == HEADER.encode()]
        return len(given) == 1 and hmac.compare_digest(hashlib.sha256(given[0]).hexdigest(), self._lock)


@dataclass(frozen=True)
class _Stack:
    """Builds an app's chain of middleware, with the gate outside of everything that is added before it is built."""

    build: Callable[[], App]
    lock: str

    def __call__(self) -> App:
        return Gate(self.build(), self.lock)


def place(module: Any, args: Any, lock: str) -> None:
    """Put the gate in front of SGLang's app, in the launcher before it listens.

    Args:
        module: ``sglang.srt.entrypoints.http_server``.
        args: Its ``ServerArgs``.
        lock: `lock_of` the token.

    Raises:
        MismatchError: the app is not one that a gate fits, has started, or is not all that will listen.
    """
    for name, legal in ELSEWHERE.items():
        if (getattr(args, name, None) or legal) != legal:
            raise _not_in_place(f"--{name.replace('_', '-')} listens without it")
    if hasattr(module, NATIVE) and getattr(args, "grpc_port", None) is not None:
        raise _not_in_place("--grpc-port listens without it")
    app: Any = getattr(module, "app", None)
    build = getattr(app, "build_middleware_stack", None)
    if isinstance(build, _Stack) and build.lock == lock:
        return
    if not callable(build) or getattr(app, "middleware_stack", module) is not None:
        raise _not_in_place("the HTTP server is built in another way, or has started")
    app.build_middleware_stack = _Stack(build, lock)


def _not_in_place(reason: str) -> MismatchError:
    return MismatchError(
        f"the gate of a server that is {REASON} is not in place: {reason}",
        where="sglang.srt.entrypoints.http_server.app",
        fix=f"leave that out, {INSTEAD}",
    )


async def _turn_away(scope: Scope, send: Send) -> None:
    if scope["type"] == "http":
        body = {"error": {"message": REASON, "type": "unavailable", "code": 503}}
        await _answer(send, 503, body, ((b"retry-after", str(RETRY_SECONDS).encode()),))
    else:
        await send({"type": "websocket.close", "code": 1013, "reason": REASON})


async def _answer(send: Send, status: int, body: Any, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    data = json.dumps(body).encode() + b"\n"
    plain = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*plain, *headers]})
    await send({"type": "http.response.body", "body": data})
