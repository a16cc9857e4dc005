"""What a client asked for, how far its answer has come, and what it is told on the way."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from kvcq.runtime.hf.cache import QuantizedCache
from kvcq.runtime.hf.engine.sampling import Sampler, Sampling
from kvcq.runtime.hf.engine.text import Decode, Token, Transcript

Reason = Literal["stop", "length"]
Trouble = Literal["timeout", "shutdown", "memory", "internal"]


@dataclass(frozen=True)
class Ask:
    """One prompt and how to continue it.

    Attributes:
        prompt: Token ids, at least one.
        max_tokens: Most tokens of the answer; 0 only reads the prompt.
        sampling: How each token is chosen.
        stop: Texts that end the answer; they are not part of it.
        stop_ids: Tokens that end the answer; they are not part of it.
        prompt_scores: Tell the log-probabilities of the prompt's own tokens too.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    prompt_scores: bool = False

    @property
    def budget(self) -> int:
        """Tokens that the cache may come to hold."""
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True)
class Scored:
    """The prompt has been read; its tokens with their log-probabilities, the first without one."""

    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Piece:
    """The answer goes on: text that stays, and the tokens that are finished with it."""

    text: str
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Done:
    """The answer is complete.

    Attributes:
        reason: ``stop``: a stop text or token; ``length``: `max_tokens` are reached.
        generated: Tokens chosen, the one that stopped included.
    """

    reason: Reason
    generated: int


@dataclass(frozen=True)
class Failed:
    """The answer will not be completed."""

    trouble: Trouble
    message: str


Event = Scored | Piece | Done | Failed


class State(Enum):
    """Where a request is; it only moves down this list, and `cancel` may end it anywhere."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


class Request:
    """A request on its way through the engine; the engine's thread owns everything but `cancelled`.

    Args:
        ask: What was asked.
        deliver: Receives the events, from the engine's thread; after `Done` or `Failed` there are none.
        decode: Token ids to text.
        timeout: Seconds from now after which it fails.
    """

    _numbers = itertools.count()

    def __init__(self, ask: Ask, deliver: Callable[[Event], None], decode: Decode, timeout: float) -> None:
        self.id = f"request-{next(self._numbers)}"
        self.ask, self.deliver = ask, deliver
        self.state = State.WAITING
        self.deadline = time.monotonic() + timeout
        self.cancelled = threading.Event()
        self.transcript = Transcript(decode, ask.stop)
        self.sampler = Sampler(ask.sampling)
        self.cache: QuantizedCache | None = None
        self.fed = 0
        self.generated: list[int] = []
        self.scored: list[Token] = []

    def begin(self, cache: QuantizedCache) -> None:
        """Enter the first forward."""
        self.cache, self.state = cache, State.PREFILL

    def next_tokens(self, chunk: int) -> tuple[int, ...]:
        """Return the token ids of the next forward: a chunk of the prompt, or the token chosen last."""
        if self.state is State.PREFILL:
            return self.ask.prompt[self.fed : self.fed + chunk]
        return (self.generated[-1],)

    def end(self) -> None:
        """Let go of the cache."""
        self.state, self.cache = State.ENDED, None
