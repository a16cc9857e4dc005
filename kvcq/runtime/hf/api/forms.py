"""How answers look: the two kinds of choices, whole and in parts."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from kvcq.runtime.hf.api.service import Service, Words
from kvcq.runtime.hf.engine.text import Detokenizer, Token

Choice = dict[str, Any]


class Form(ABC):
    """The JSON of one HTTP answer.

    Args:
        service: What is served.
        prefix: First part of the answer's id.
        objects: Names of a whole answer and of a part of one.
        scored: Whether log-probabilities were asked for.
    """

    def __init__(self, service: Service, prefix: str, objects: tuple[str, str], scored: bool) -> None:
        self._objects, self._scored = objects, scored
        self.words = service.words
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": service.about.name,
            "system_fingerprint": f"kvcq-{service.about.digest[:16]}",
        }

    def envelope(
        self, choices: Sequence[Choice], *, whole: bool, usage: dict[str, int] | None = None
    ) -> dict[str, Any]:
        """Return the object that holds choices."""
        body = {**self._head, "object": self._objects[not whole], "choices": list(choices)}
        return body if usage is None else body | {"usage": usage}

    def opening(self, index: int, scored: Sequence[Token]) -> Choice | None:
        """Return the part before the first text of a choice, if there is one."""
        return None

    @abstractmethod
    def part(self, index: int, text: str, tokens: Sequence[Token], reason: str | None) -> Choice:
        """Return a part of a choice."""

    @abstractmethod
    def whole(
        self, index: int, text: str, tokens: Sequence[Token], scored: Sequence[Token], reason: str | None
    ) -> Choice:
        """Return a whole choice; `scored` are the prompt's tokens where they were asked for."""


class CompletionForm(Form):
    """``/v1/completions``: plain text; `echoes` are the prompts that choices begin with."""

    def __init__(self, service: Service, *, scored: bool, echoes: Sequence[str] | None) -> None:
        super().__init__(service, "cmpl", ("text_completion", "text_completion"), scored)
        self._echoes = echoes

    def opening(self, index: int, scored: Sequence[Token]) -> Choice | None:
        """Return the prompt, if it is echoed."""
        if self._echoes is None:
            return None
        echo = self._echoes[index]
        return self._choice(index, echo, self._scores(scored, (), len(echo)) if scored else None, None)

    def part(self, index: int, text: str, tokens: Sequence[Token], reason: str | None) -> Choice:
        """Return text with the scores of its tokens."""
        return self._choice(index, text, self._scores((), tokens, self._start(index)) if tokens else None, reason)

    def whole(
        self, index: int, text: str, tokens: Sequence[Token], scored: Sequence[Token], reason: str | None
    ) -> Choice:
        """Return the text, behind the prompt if that is echoed."""
        echo = "" if self._echoes is None else self._echoes[index]
        return self._choice(index, echo + text, self._scores(scored, tokens, len(echo)), reason)

    def _start(self, index: int) -> int:
        return 0 if self._echoes is None else len(self._echoes[index])

    def _choice(self, index: int, text: str, scores: dict[str, Any] | None, reason: str | None) -> Choice:
        return {"index": index, "text": text, "logprobs": scores, "finish_reason": reason}

    def _scores(self, prompt: Sequence[Token], tokens: Sequence[Token], start: int) -> dict[str, Any] | None:
        if not self._scored:
            return None
        offsets = [*prompt_offsets(self.words, prompt), *(start + token.offset for token in tokens)]
        every = [*prompt, *tokens]
        return {
            "tokens": [self.words.show([token.id]) for token in every],
            "token_logprobs": [token.logprob for token in every],
            "top_logprobs": [self._top(token) for token in every],
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float] | None:
        if token.logprob is None or not token.top:
            return None
        found: dict[str, float] = {}
        for other, logprob in [*token.top, (token.id, token.logprob)]:
            found.setdefault(self.words.show([other]), logprob)
        return found


def prompt_offsets(words: Words, tokens: Sequence[Token]) -> list[int]:
    """Return where each token of a prompt starts in its text."""
    detokenizer, offsets, length = Detokenizer(words.show), [], 0
    for token in tokens:
        offsets.append(length)
        length += len(detokenizer.add(token.id))
    return offsets


class ChatForm(Form):
    """``/v1/chat/completions``: a turn of the assistant."""

    def __init__(self, service: Service, *, scored: bool) -> None:
        super().__init__(service, "chatcmpl", ("chat.completion", "chat.completion.chunk"), scored)

    def opening(self, index: int, scored: Sequence[Token]) -> Choice | None:
        """Return the role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, index: int, text: str, tokens: Sequence[Token], reason: str | None) -> Choice:
        """Return text as a delta."""
        scores = self._scores(tokens) if tokens else None
        return {
            "index": index,
            "delta": {"content": text} if text else {},
            "logprobs": scores,
            "finish_reason": reason,
        }

    def whole(
        self, index: int, text: str, tokens: Sequence[Token], scored: Sequence[Token], reason: str | None
    ) -> Choice:
        """Return the turn."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._scores(tokens), "finish_reason": reason}

    def _scores(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self._scored:
            return None
        content = [
            self._entry(token.id, token.logprob) | {"top_logprobs": [self._entry(*entry) for entry in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self.words.show([token])
        # Half a character has no text, and its bytes are not known from it.
        whole = list(text.encode("utf-8")) if "�" not in text else None
        return {"token": text, "logprob": logprob, "bytes": whole}
