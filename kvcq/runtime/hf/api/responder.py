"""From events to HTTP: whole answers and server-sent events, given up when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvcq.runtime.hf.api.errors import of_failure
from kvcq.runtime.hf.api.forms import Form
from kvcq.runtime.hf.api.service import Answers, EngineFailure
from kvcq.runtime.hf.engine.request import Done, Piece, Scored
from kvcq.runtime.hf.engine.text import Token

T = TypeVar("T")


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, or cancel it when the client disconnects; the body has been read before.

    Raises:
        ClientLeft: the client was faster.
    """

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for other in (task, gone):
            other.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class Outcome(Response):
    """One HTTP answer: all of it, or event by event.

    Nothing is sent before the first event, so that a request that fails until then has an HTTP status.

    Args:
        answers: The choices; closed when this response is done with.
        form: How they look.
        choices: How many there are.
        prompt_tokens: Tokens of the prompts.
        stream: Send server-sent events.
        usage: End the stream with the numbers of tokens.
    """

    def __init__(
        self, answers: Answers, form: Form, *, choices: int, prompt_tokens: int, stream: bool, usage: bool
    ) -> None:
        super().__init__()
        self._answers, self._form, self._choices = answers, form, choices
        self._prompt_tokens, self._stream, self._usage = prompt_tokens, stream, usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        work = self._send_events(send) if self._stream else self._whole()
        try:
            answer = await unless_left(receive, work)
            if answer is not None:
                await answer(scope, receive, send)
        except (ClientLeft, OSError):
            return
        finally:
            self._answers.close()

    async def _whole(self) -> Response | None:
        texts: list[list[str]] = [[] for _ in range(self._choices)]
        tokens: list[list[Token]] = [[] for _ in range(self._choices)]
        scored: list[tuple[Token, ...]] = [()] * self._choices
        done: dict[int, Done] = {}
        try:
            async for index, event in self._answers:
                if isinstance(event, Piece):
                    texts[index].append(event.text)
                    tokens[index] += event.tokens
                elif isinstance(event, Scored):
                    scored[index] = event.tokens
                elif isinstance(event, Done):
                    done[index] = event
        except EngineFailure as failure:
            return of_failure(failure.failed).response()
        choices = [
            self._form.whole(i, "".join(texts[i]), tokens[i], scored[i], done[i].reason) for i in range(self._choices)
        ]
        generated = sum(event.generated for event in done.values())
        return JSONResponse(self._form.envelope(choices, whole=True, usage=self._numbers(generated)))

    async def _send_events(self, send: Send) -> Response | None:
        begun = False
        try:
            async with aclosing(self._parts()) as parts:
                async for part in parts:
                    if not begun:
                        await _begin(send)
                        begun = True
                    await _send(send, json.dumps(part, ensure_ascii=False))
            await _send(send, "[DONE]")
        except EngineFailure as failure:
            error = of_failure(failure.failed)
            if not begun:
                return error.response()
            await _send(send, json.dumps(error.body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return None

    async def _parts(self) -> AsyncGenerator[dict[str, Any], None]:
        opened: set[int] = set()
        generated = 0
        async for index, event in self._answers:
            if index not in opened:
                opened.add(index)
                first = self._form.opening(index, event.tokens if isinstance(event, Scored) else ())
                if first is not None:
                    yield self._form.envelope([first], whole=False)
            if isinstance(event, Piece):
                yield self._form.envelope([self._form.part(index, event.text, event.tokens, None)], whole=False)
            elif isinstance(event, Done):
                generated += event.generated
                yield self._form.envelope([self._form.part(index, "", (), event.reason)], whole=False)
        if self._usage:
            yield self._form.envelope([], whole=False, usage=self._numbers(generated))

    def _numbers(self, generated: int) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self._prompt_tokens + generated,
        }


async def _begin(send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send(send: Send, data: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
