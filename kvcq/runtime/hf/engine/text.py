"""Tokens to text as they come: whole characters only, and nothing that may turn out to belong to a stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "�"
# An unfinished UTF-8 character has up to three bytes. Some decoders write a replacement for each of them, and for the
# up to four of the whole character before it.
LONGEST_HALF = 7


@dataclass(frozen=True)
class Token:
    """A token with what was asked about it.

    Attributes:
        id: Its id.
        offset: Characters of the text before it.
        logprob: Its log-probability in nats, None if not asked for or not defined.
        top: Likeliest ids with their log-probabilities.
    """

    id: int
    offset: int = 0
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Detokenizer:
    """Text of a growing list of tokens. The pieces joined are the text of all tokens, an unfinished end left out.

    Decoders look at neighbours (bytes of one character, spaces between words), so each step decodes from the token
    group before the last complete character on.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0
        self._told = 0

    def add(self, token: int) -> str:
        """Return the text that is now certain; empty inside a character."""
        self._ids.append(token)
        window = self._decode(self._ids)
        whole = without_half(window)
        piece = whole[self._told :]
        self._told = max(self._told, len(whole))
        if whole == window and piece:
            # The tokens since the last whole character stay as context for the next one.
            self._ids = self._ids[self._start :]
            self._start = len(self._ids)
            self._told = len(self._decode(self._ids))
        elif whole == window:
            self._ids.pop()
        return piece


def without_half(text: str) -> str:
    """Cut what may be an unfinished character off the end of a decoded text."""
    for _ in range(LONGEST_HALF):
        text = text.removesuffix(REPLACEMENT)
    return text


class StopText:
    """Holds text back while it may be the beginning of a stop text; the first stop text to be complete ends it.

    Attributes:
        found: Whether a stop text has appeared; the text before it is all that was let through.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """Return the text that can be let through."""
        if self.found:
            return ""
        self._held += text
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            self.found = True
            self._held = self._held[: min(ends)[1]]
            return self.flush()
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        free, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return free

    def flush(self) -> str:
        """Return what is held: no more text comes."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class Transcript:
    """The answer of one request: tokens in, text and finished tokens out."""

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._detokenizer, self._stop = Detokenizer(decode), StopText(stops)
        self._decoded = self._told = 0
        self._pending: list[tuple[int, Token]] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop text has appeared."""
        return self._stop.found

    def add(
        self, token: int, logprob: float | None = None, top: tuple[tuple[int, float], ...] = ()
    ) -> tuple[str, tuple[Token, ...]]:
        """Return text that stays and the tokens that lie in it; at a stop text, what lies behind it is dropped."""
        piece = self._detokenizer.add(token)
        entry = Token(token, self._decoded, logprob, top)
        self._decoded += len(piece)
        self._pending.append((self._decoded, entry))
        text = self._stop.add(piece)
        self._told += len(text)
        if self.stopped:
            tokens = tuple(entry for _, entry in self._pending if entry.offset < self._told)
            self._pending = []
            return text, tokens
        return text, self._release()

    def finish(self) -> tuple[str, tuple[Token, ...]]:
        """Return what was held back, at the end of an answer that no stop text ended."""
        text = self._stop.flush()
        self._told += len(text)
        return text, self._release()

    def _release(self) -> tuple[Token, ...]:
        tokens = tuple(entry for end, entry in self._pending if end <= self._told)
        self._pending = self._pending[len(tokens) :]
        return tokens
