"""One thread owns the model; requests take turns, a chunk of a prompt or one token each.

Every request has a cache of its own and every forward holds one request, so an answer cannot depend on who else is
being served. What was admitted can finish: pages for prompt and answer are reserved first.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcq.errors import KvcqError
from kvcq.models.library import forward
from kvcq.runtime.hf.cache import QuantizedCache
from kvcq.runtime.hf.engine.request import Ask, Done, Event, Failed, Piece, Reason, Request, Scored, State, Trouble
from kvcq.runtime.hf.engine.sampling import score
from kvcq.runtime.hf.engine.text import Decode, Token
from kvcq.runtime.layout import PAGE
from kvcq.runtime.ledger import Full, Ledger, page_count

Deliver = Callable[[Event], None]


@dataclass(frozen=True)
class Limits:
    """What the engine takes on.

    Attributes:
        pages: Pages of 64 tokens for all running requests together.
        running: Most requests that run at once.
        queue: Most requests that wait beyond those.
        chunk: Most prompt tokens in one forward.
        timeout: Seconds after which a request fails, waiting included.
    """

    pages: int
    running: int = 8
    queue: int = 64
    chunk: int = 512
    timeout: float = 600.0


@dataclass
class Counts:
    """What has happened since the start; written by the engine's thread only.

    Attributes:
        prefilled: Prompt tokens computed.
        generated: Tokens chosen.
        clamped: Values beyond the float16 range that were clamped.
        done: Finished answers by reason.
        failed: Failed requests by trouble; ``cancelled`` are those whose client left.
    """

    prefilled: int = 0
    generated: int = 0
    clamped: int = 0
    done: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)


class Refused(KvcqError):
    """A request was not taken in.

    Attributes:
        closing: The engine is shutting down; otherwise its queue is full.
    """

    def __init__(self, what: str, *, closing: bool) -> None:
        super().__init__(what)
        self.closing = closing


class Engine:
    """Answers requests on one model.

    Args:
        model: In eval mode; nobody else runs it meanwhile.
        new_cache: Makes an empty cache of the model.
        decode: Token ids to text, special tokens left out; called from the engine's thread.
        limits: What it takes on.
    """

    def __init__(
        self, model: PreTrainedModel, new_cache: Callable[[], QuantizedCache], decode: Decode, limits: Limits
    ) -> None:
        self.limits, self.counts = limits, Counts()
        self._model, self._new_cache, self._decode = model, new_cache, decode
        self._ledger = Ledger(limits.pages, limits.running)
        self._wake = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._running: deque[Request] = deque()
        self._closing_at: float | None = None
        self._thread = threading.Thread(target=self._work, name="kvcq-engine", daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def closing(self) -> bool:
        """Whether new requests are refused for good."""
        return self._closing_at is not None

    @property
    def waiting(self) -> int:
        """Requests that wait to be admitted."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that take turns."""
        return len(self._running)

    @property
    def reserved_tokens(self) -> int:
        """Tokens for which pages are reserved."""
        return (self._ledger.pages - self._ledger.free_pages) * PAGE

    def cache_bytes(self) -> int:
        """Return the bytes of all quantized rows of the running requests, as allocated, room ahead included."""
        caches = [request.cache for request in list(self._running)]
        return sum(cache.allocated_bytes() + cache.ahead_bytes() for cache in caches if cache is not None)

    def submit(self, asks: Sequence[tuple[Ask, Deliver]]) -> list[Request]:
        """Take in all of some requests or none; their events are delivered from the engine's thread.

        Raises:
            Refused: the queue is full, or the engine is closing.
            ValueError: one that all pages together could not hold would wait for ever.
        """
        if any(page_count(ask.budget) > self.limits.pages for ask, _ in asks):
            raise ValueError(f"a request needs more than {self.limits.pages} pages")
        requests = [Request(ask, deliver, self._decode, self.limits.timeout) for ask, deliver in asks]
        with self._wake:
            if self.closing or not self.alive:
                raise Refused("the server is shutting down", closing=True)
            if self.waiting + self.running + len(requests) > self.limits.queue + self.limits.running:
                busy = f"{self.running} requests are running and {self.waiting} are waiting"
                raise Refused(f"the queue is full: {busy}", closing=False)
            self._waiting.extend(requests)
            self._wake.notify()
        return requests

    def cancel(self, request: Request) -> None:
        """End a request whose client has left; it hears nothing more. Ended ones stay as they are."""
        request.cancelled.set()
        with self._wake:
            self._wake.notify()

    def close(self, grace: float) -> None:
        """Refuse new requests, and fail those that are not finished after `grace` seconds; returns at once."""
        with self._wake:
            at = time.monotonic() + grace
            self._closing_at = at if self._closing_at is None else min(at, self._closing_at)
            self._wake.notify()

    def join(self, timeout: float | None = None) -> None:
        """Wait until everything is answered after `close`."""
        self._thread.join(timeout)

    def _work(self) -> None:
        try:
            while self._admit():
                request = self._running[0]
                self._turn(request)
                if self._running and self._running[0] is request:
                    self._running.rotate(-1)
        except BaseException as error:
            self.failure = error
            self.close(0)
            with self._wake:
                for request in [*self._running, *self._waiting]:
                    self._tell(request, Failed("internal", "the engine has stopped"))

    def _admit(self) -> bool:
        """Drop what has ended, admit what has room, in order; return False once closed and done."""
        with self._wake:
            while True:
                for request in [*self._waiting, *self._running]:
                    self._drop_if_over(request)
                while self._waiting and self._reserve(self._waiting[0]):
                    self._running.append(self._waiting.popleft())
                if self._running:
                    return True
                if self.closing:
                    return False
                self._wake.wait()

    def _reserve(self, request: Request) -> bool:
        try:
            self._ledger.admit(request.id, request.ask.budget)
        except Full:
            return False
        return True

    def _drop_if_over(self, request: Request) -> None:
        now = time.monotonic()
        if request.cancelled.is_set():
            self._end(request)
            self.counts.failed["cancelled"] += 1
        elif self._closing_at is not None and now >= self._closing_at:
            self._fail(request, "shutdown", "the server is shutting down")
        elif now >= request.deadline:
            self._fail(request, "timeout", f"no complete answer within {self.limits.timeout:g} seconds")

    def _turn(self, request: Request) -> None:
        """Run one forward of a request; whatever goes wrong is its own failure."""
        try:
            if request.cache is None:
                cache = self._new_cache()
                cache.expect(request.ask.budget)
                request.begin(cache)
            self._step(request)
        except (MemoryError, torch.OutOfMemoryError) as error:
            self._fail(request, "memory", f"out of memory: {error}")
        except Exception as error:
            # torch reports an exhausted CPU allocator as a plain RuntimeError.
            if "DefaultCPUAllocator" in str(error):
                self._fail(request, "memory", "out of memory")
            else:
                self._fail(request, "internal", f"{type(error).__name__}: {error}")

    def _step(self, request: Request) -> None:
        ask = request.ask
        tokens = request.next_tokens(self.limits.chunk)
        prompt = request.state is State.PREFILL
        keep = None if prompt and ask.prompt_scores else 1
        logits = forward(self._model, torch.tensor([tokens]), cache=request.cache, keep=keep)[0].float()
        if not bool(torch.isfinite(logits).all()):
            raise ValueError(f"logits are not finite after {request.fed + len(tokens)} tokens")
        if prompt:
            self.counts.prefilled += len(tokens)
            if ask.prompt_scores:
                self._score_prompt(request, tokens, logits)
        request.fed += len(tokens)
        if request.fed < len(ask.prompt):
            return
        if prompt:
            request.state = State.DECODE
            if ask.prompt_scores:
                self._tell(request, Scored(tuple(request.scored)))
            if not ask.max_tokens:
                self._finish(request, "length")
                return
        self._extend(request, logits[-1])

    def _score_prompt(self, request: Request, tokens: Sequence[int], logits: Tensor) -> None:
        """Score the prompt's tokens behind the rows of one chunk: each row's logits are those of the next token."""
        ask = request.ask
        if not request.scored:
            request.scored.append(Token(ask.prompt[0]))
        for row, token in zip(logits, ask.prompt[request.fed + 1 : request.fed + 1 + len(tokens)], strict=False):
            request.scored.append(Token(token, 0, *score(row, token, ask.sampling.scores or 0)))

    def _extend(self, request: Request, logits: Tensor) -> None:
        """Choose the next token and tell what can be told."""
        ask = request.ask
        token = request.sampler.choose(logits)
        request.generated.append(token)
        self.counts.generated += 1
        if token in ask.stop_ids:
            self._finish(request, "stop")
            return
        scores = () if ask.sampling.scores is None else score(logits, token, ask.sampling.scores)
        text, tokens = request.transcript.add(token, *scores)
        if text or tokens:
            self._tell(request, Piece(text, tokens))
        if request.transcript.stopped:
            self._finish(request, "stop")
        elif len(request.generated) == ask.max_tokens:
            self._finish(request, "length")

    def _finish(self, request: Request, reason: Reason) -> None:
        if not request.transcript.stopped:
            text, tokens = request.transcript.finish()
            if text or tokens:
                self._tell(request, Piece(text, tokens))
        self._end(request)
        self.counts.done[reason] += 1
        self._tell(request, Done(reason, len(request.generated)))

    def _fail(self, request: Request, trouble: Trouble, message: str) -> None:
        self._end(request)
        self.counts.failed[trouble] += 1
        self._tell(request, Failed(trouble, message))

    def _end(self, request: Request) -> None:
        """Give back what a request holds, before its client is told: then the room is there for the next one."""
        with self._wake:
            for queue in (self._waiting, self._running):
                with suppress(ValueError):
                    queue.remove(request)
            if request.id in self._ledger:
                self._ledger.release(request.id)
        if request.cache is not None:
            self.counts.clamped += request.cache.clamped()
        request.end()

    @staticmethod
    def _tell(request: Request, event: Event) -> None:
        try:
            request.deliver(event)
        except Exception:  # the client's event loop is gone: nobody listens
            request.cancelled.set()
