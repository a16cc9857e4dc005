"""Bodies are read before anything else sees them: no bigger than allowed, and not drop by drop."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvcq.runtime.hf.api.errors import ApiError

MOST_BYTES = 4 << 20
READ_SECONDS = 30.0


class BodyLimit:
    """Middleware that reads a whole body first.

    Args:
        app: What answers.
        most: Bytes that a body may have; more is answered with 413.
        seconds: Time to receive it; later is answered with 408.
    """

    def __init__(self, app: ASGIApp, most: int = MOST_BYTES, seconds: float = READ_SECONDS) -> None:
        self._app, self._most, self._seconds = app, most, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._read(receive)
        except TimeoutError:
            await ApiError(408, f"no complete body within {self._seconds:g} seconds").response()(scope, receive, send)
            return
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is None:
            return
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the body, or None from a client that has left."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._most:
                raise ApiError(413, f"the body has more than {self._most} bytes", code="body_too_large")
            if not message.get("more_body", False):
                return b"".join(parts)
