"""What a task sees of a model: a runner that starts empty caches, and sessions that extend them.

Every number of the model-level tasks comes from such sessions: prefill in chunks and single-token steps on the cache
that is served, never a one-pass forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from kvcq.errors import EvaluationError, ResourceError
from kvcq.spec.boundary import served_boundaries

CHUNK = 512

Progress = Callable[[int, int], None]
"""Told ``(done, total)`` items after each."""


class Session(Protocol):
    """One request on one cache."""

    @property
    def length(self) -> int:
        """Tokens in the cache."""

    def extend(self, tokens: Tensor, keep: int = 1) -> Tensor:
        """Append tokens to the cache by one forward.

        Args:
            tokens: LongTensor ``[n]``, n >= 1.
            keep: How many of the last rows to return.

        Returns:
            Logits ``[min(keep, n), vocab]`` of the last rows.
        """


class Runner(Protocol):
    """One artifact, or the BF16 reference, on one model."""

    @property
    def name(self) -> str:
        """The artifact's name in the report."""

    def start(self, prompt: int) -> Session:
        """Return a session with an empty cache for a prompt of so many tokens; what follows them is decoding."""


@dataclass(frozen=True)
class Chunking:
    """How a prompt is cut into forwards.

    Attributes:
        chunk: Tokens in one forward.
        cached_at: Where a prefix was found in the cache: a forward begins there whatever the chunk.
    """

    chunk: int = CHUNK
    cached_at: int | None = None

    def spans(self, n: int) -> list[tuple[int, int]]:
        """Return the half-open ranges of the forwards of `n` tokens.

        Raises:
            ValueError: `cached_at` outside (0, n), or a chunk below 1.
        """
        starts = [0, *(boundary.position for boundary in served_boundaries(n, self.chunk, self.cached_at))]
        return list(pairwise([*starts, n]))


@dataclass(frozen=True)
class Answer:
    """A greedy continuation: its tokens without the one that stopped it, and whether the limit cut it."""

    tokens: tuple[int, ...]
    truncated: bool


@contextmanager
def item(name: str) -> Iterator[None]:
    """Turn whatever goes wrong within into an error that names the item: it cannot be scored, so nothing is.

    Raises:
        EvaluationError: names the item.
        ResourceError: memory ran out.
    """
    try:
        yield
    except (ResourceError, MemoryError, torch.OutOfMemoryError):
        raise
    except EvaluationError as error:
        where = name if error.where is None else f"{name}, {error.where}"
        raise EvaluationError(error.what, where=where, fix=error.fix) from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise EvaluationError(f"the item failed to run, {what}", where=name, fix="nothing was scored") from error


@torch.no_grad()
def prefill(session: Session, tokens: Tensor, chunking: Chunking) -> Tensor:
    """Append a prompt ``[n]`` forward by forward, and return the logits ``[vocab]`` of its last token, float32.

    Raises:
        EvaluationError: logits that are not finite.
    """
    logits = torch.empty(0)
    for start, stop in chunking.spans(len(tokens)):
        logits = session.extend(tokens[start:stop])
    return finite(logits, session)[-1]


@torch.no_grad()
def greedy(session: Session, logits: Tensor, limit: int, stop: Collection[int]) -> Answer:
    """Continue greedily, one token a forward, from the `logits` ``[vocab]`` of the last token.

    Ends at a token of `stop` or after `limit` tokens. Of equal logits the lowest id wins.

    Raises:
        EvaluationError: logits that are not finite.
    """
    tokens: list[int] = []
    while len(tokens) < limit:
        token = int(logits.argmax())
        if token in stop:
            return Answer(tuple(tokens), truncated=False)
        tokens.append(token)
        if len(tokens) < limit:
            logits = finite(session.extend(torch.tensor([token])), session)[-1]
    return Answer(tuple(tokens), truncated=True)


def finite(logits: Tensor, session: Session) -> Tensor:
    """Return logits as float32.

    Raises:
        EvaluationError: NaN or an infinity among them; names the position.
    """
    logits = logits.float()
    rows = torch.isfinite(logits).all(-1)
    if not bool(rows.all()):
        first = session.length - len(rows) + int((~rows).nonzero()[0])
        raise EvaluationError(
            "logits are not finite", where=f"position {first}", fix="check the model with --dtype float32"
        )
    return logits
