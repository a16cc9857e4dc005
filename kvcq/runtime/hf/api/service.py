"""What the endpoints share: the engine, the tokenizer, and what is told about bundle and model."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcq.runtime.hf.api.about import About
from kvcq.runtime.hf.api.errors import ApiError
from kvcq.runtime.hf.api.metrics import Meters
from kvcq.runtime.hf.engine.engine import Engine, Refused
from kvcq.runtime.hf.engine.request import Ask, Done, Event, Failed, Request

Ids = Sequence[int]


class Words:
    """The tokenizer behind one lock: its own is not made for an engine's thread beside those of the clients.

    Args:
        encode: Text to token ids, with the special tokens of a prompt.
        render: Conversation, and whether to think, to the token ids up to where the answer starts.
        decode: Token ids to text, special tokens left out.
        show: Token ids to text, special tokens included.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        render: Callable[[list[dict[str, Any]], bool], list[int]],
        decode: Callable[[Ids], str],
        show: Callable[[Ids], str],
    ) -> None:
        self._lock = threading.Lock()
        self._encode, self._render, self._decode, self._show = encode, render, decode, show

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            UnicodeError: half a surrogate pair, which JSON can write and no tokenizer reads.
        """
        text.encode()
        with self._lock:
            return self._encode(text)

    def render(self, messages: list[dict[str, Any]], thinking: bool) -> list[int]:
        """Return the token ids of a conversation.

        Raises:
            UnicodeError: as in `encode`.
        """
        json.dumps(messages, ensure_ascii=False).encode()
        with self._lock:
            return self._render(messages, thinking)

    def decode(self, ids: Ids) -> str:
        """Return the text of an answer."""
        with self._lock:
            return self._decode(ids)

    def show(self, ids: Ids) -> str:
        """Return the text of tokens, special ones included."""
        with self._lock:
            return self._show(ids)


class EngineFailure(Exception):
    """The engine could not complete a request."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


class Answers:
    """The answers to the choices of one HTTP request, as they come.

    Args:
        engine: Where they are computed.
        meters: Told how long it took.
    """

    def __init__(self, engine: Engine, meters: Meters) -> None:
        self._engine, self._meters = engine, meters
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._requests: list[Request] = []
        self._began = time.monotonic()

    def submit(self, asks: Sequence[Ask]) -> None:
        """Hand the choices to the engine, all or none.

        Raises:
            Refused: the engine takes nothing more.
        """
        self._requests = self._engine.submit([(ask, self._deliver(index)) for index, ask in enumerate(asks)])

    def _deliver(self, index: int) -> Callable[[Event], None]:
        def deliver(event: Event) -> None:
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return deliver

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        """Yield (choice, event) until all are done.

        Raises:
            EngineFailure: one of them failed.
        """
        unfinished, first = len(self._requests), True
        while unfinished:
            index, event = await self._events.get()
            if isinstance(event, Failed):
                raise EngineFailure(event)
            if first:
                self._meters.first_token.observe(time.monotonic() - self._began)
                first = False
            unfinished -= isinstance(event, Done)
            yield index, event
        self._meters.duration.observe(time.monotonic() - self._began)

    def close(self) -> None:
        """Cancel what is not finished."""
        for request in self._requests:
            self._engine.cancel(request)


@dataclass(frozen=True)
class Service:
    """The engine with everything that endpoints need."""

    engine: Engine
    words: Words
    about: About
    meters: Meters
    started: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str) -> None:
        """Refuse a model that is not served.

        Raises:
            ApiError: 404.
        """
        if name != self.about.name:
            message = f"the model {name[:200]!r} does not exist, this server has {self.about.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_length(self, ids: Ids, max_tokens: int, param: str) -> None:
        """Refuse a prompt that is empty, holds ids of no token, or is too long for its answer.

        Raises:
            ApiError: 400.
        """
        if not ids:
            raise ApiError(400, "the prompt has no tokens", param=param)
        if not all(0 <= token < self.about.vocabulary for token in ids):
            raise ApiError(400, f"token ids are from 0 to {self.about.vocabulary - 1}", param=param)
        if len(ids) + max_tokens > self.about.context:
            message = (
                f"this server takes {self.about.context} tokens, the prompt has {len(ids)} or more, its answer up to "
                f"{max_tokens}"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def submit(self, asks: Sequence[Ask]) -> Answers:
        """Hand the choices of a request to the engine, all or none.

        Raises:
            ApiError: 400: more choices than the server ever takes at once; 429: the queue is full; 503: shutting down.
        """
        if len(asks) > (most := self.engine.limits.running + self.engine.limits.queue):
            raise ApiError(400, f"this server takes at most {most} choices at once", param="n")
        answers = Answers(self.engine, self.meters)
        try:
            answers.submit(asks)
        except Refused as refused:
            status, code = (503, "shutdown") if refused.closing else (429, "queue_full")
            raise ApiError(status, refused.what, code=code) from None
        return answers
