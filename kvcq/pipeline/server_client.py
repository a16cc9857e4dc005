"""A client of OpenAI-compatible servers in which no failure can pass for an answer.

What is retried: no connection, time limits, HTTP 408, 409, 425, 429 and 5xx, answers that are not what the API
promises. Everything else is refused at once. When the attempts are used up the caller gets an error that names the
item and what came last.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

import httpx2

from kvcq.errors import EvaluationError, InputError, KvcqError, UnavailableError, shown
from kvcq.version import __version__

Api = Literal["chat", "completions"]
Prompt = str | tuple[int, ...] | tuple[dict[str, str], ...]
"""Text, token ids (completions only), or messages (chat only)."""

MAX_BYTES = 64 << 20
PAUSE = 0.5
LONGEST_PAUSE = 30.0
CONNECT_SECONDS = 10.0
LIST_SECONDS = 30.0
SHOWN_BODY = 200
RETRIED = frozenset({408, 409, 425, 429})
# How servers say that the model ended by itself, and that the limit cut it.
ENDED = frozenset({"stop", "eos", "eos_token", "stop_sequence", "end_turn"})
CUT = frozenset({"length", "max_tokens"})
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Reply:
    """One answer: its text, whether the token limit cut it, and the tokens that the server counted, if it does."""

    text: str
    truncated: bool
    prompt_tokens: int | None
    completion_tokens: int | None


@dataclass(frozen=True)
class Wish:
    """What is asked for besides the prompt.

    Attributes:
        model: Name under which the server serves the model.
        temperature: 0 is greedy.
        max_tokens: Most tokens of an answer.
        body: More fields of the request, e.g. ``top_p``, as the server knows them.
        allow_empty: Take an empty text for an answer; otherwise it is an error.
    """

    model: str
    temperature: float
    max_tokens: int
    body: dict[str, Any] = field(default_factory=dict)
    allow_empty: bool = False


class _Again(Exception):
    """One attempt failed in a way that may pass."""

    def __init__(self, reason: str, *, pause: float = 0.0, unreachable: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.pause = pause
        self.unreachable = unreachable


class ServerClient:
    """Requests to one server; an async context manager.

    Args:
        name: How the report calls the server.
        url: ``http://HOST:PORT`` or with the path that ends in ``/v1``.
        api: Which of the two kinds of completions.
        seconds: Time limit of one attempt, from connecting to the last byte.
        retries: Attempts after the first.
        key: Sent as bearer token.

    Raises:
        InputError: not a URL, or one with a password.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        api: Api = "chat",
        seconds: float = 600.0,
        retries: int = 4,
        key: str | None = None,
    ) -> None:
        self.name = name
        self.base = base_url(url)
        self.api: Api = api
        self._seconds = seconds
        self._retries = retries
        # A proxy of the environment cannot reach this machine's own ports.
        trust = self.base.host not in LOOPBACK
        headers = {"User-Agent": f"kvcq/{__version__}"} | ({"Authorization": f"Bearer {key}"} if key else {})
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx2.Timeout(None, connect=CONNECT_SECONDS)
        self._client = httpx2.AsyncClient(headers=headers, limits=limits, timeout=timeout, trust_env=trust)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def models(self) -> tuple[str, ...]:
        """Return the names of the served models; empty if the server has no such list.

        Raises:
            UnavailableError: nobody answers.
            EvaluationError: another failure.
        """
        try:
            answer = await self._tried("GET", "models", None, "list of models", self._listed, LIST_SECONDS)
        except _Absent:
            return ()
        return tuple(answer)

    async def ask(self, prompt: Prompt, seed: int, wish: Wish, item: str) -> Reply:
        """Return the answer to one prompt.

        Args:
            prompt: What to send.
            seed: Of the sampling.
            wish: Model and limits.
            item: How errors call the prompt.

        Raises:
            EvaluationError: refused, or failed in every attempt; names server, item and status.
            UnavailableError: the server cannot be reached any more.
        """
        place = "chat/completions" if self.api == "chat" else "completions"
        body = wish.body | {
            "model": wish.model,
            "temperature": wish.temperature,
            "max_tokens": wish.max_tokens,
            "seed": seed,
            "stream": False,
        }
        if self.api == "completions":
            body["prompt"] = prompt
        else:
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            return await self._tried("POST", place, body, item, lambda plain: self._reply(plain, wish), self._seconds)
        except _Absent:
            raise self._failed(f"HTTP 404: the server has no /{place}", item, "see --api and the URL") from None

    async def _tried(self, method: str, place: str, body: Any, item: str, read: Any, seconds: float) -> Any:
        """Send until `read` understands the answer, at most as often as allowed."""
        last = _Again("no attempt")
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(min(LONGEST_PAUSE, max(last.pause, PAUSE * 2 ** (attempt - 1))))
            try:
                return read(await self._sent(method, place, body, item, seconds))
            except _Again as failure:
                last = failure
        tries = "1 attempt" if self._retries == 0 else f"{self._retries + 1} attempts"
        if last.unreachable:
            raise UnavailableError(
                f"no answer from {self.base}: {last.reason}, in {tries}",
                where=f"--server {self.name}, {item}",
                fix="start the server, or correct the URL",
            )
        raise self._failed(f"{last.reason}, in {tries}", item, "see the server's log")

    async def _sent(self, method: str, place: str, body: Any, item: str, seconds: float) -> Any:
        """Make one attempt and return the decoded JSON."""
        try:
            async with asyncio.timeout(seconds), self._client.stream(method, f"{self.base}/{place}", json=body) as got:
                data = bytearray()
                async for chunk in got.aiter_bytes():
                    data += chunk
                    if len(data) > MAX_BYTES:
                        raise self._failed(
                            f"an answer of more than {MAX_BYTES >> 20} MiB", item, "see the server's log"
                        )
                self._check_status(got, bytes(data), item)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise _Again(_reason(error), unreachable=True) from None
        except (TimeoutError, httpx2.TimeoutException):
            raise _Again(f"no complete answer within {seconds:g} s") from None
        except httpx2.HTTPError as error:
            raise _Again(f"broken connection: {_reason(error)}") from None
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise _Again(f"not JSON: {shown(bytes(data).decode('utf-8', 'replace'))}") from None

    def _check_status(self, answer: httpx2.Response, data: bytes, item: str) -> None:
        status = answer.status_code
        if status == 200:
            return
        said = f"HTTP {status}: {_message(data) or answer.reason_phrase}"
        if status in RETRIED or status >= 500:
            pause = answer.headers.get("retry-after", "")
            raise _Again(said, pause=float(pause) if pause.isdecimal() else 0.0)
        if status == 404 and not _message(data):
            raise _Absent
        fix = (
            "give the key with --api-key-file"
            if status in (401, 403)
            else "see --served-model, --max-tokens and --body"
        )
        raise self._failed(said, item, fix)

    @staticmethod
    def _listed(plain: Any) -> list[str]:
        try:
            return [str(entry["id"]) for entry in plain["data"]]
        except (KeyError, TypeError):
            raise _Again(f"not a list of models: {shown(plain)}") from None

    def _reply(self, plain: Any, wish: Wish) -> Reply:
        """Read a completion; what is no complete answer raises."""
        try:
            choice = plain["choices"][0]
            text = choice["message"]["content"] if self.api == "chat" else choice["text"]
            finish = choice["finish_reason"]
        except (KeyError, IndexError, TypeError):
            raise _Again(f"no choice in the answer: {shown(plain)}") from None
        truncated = finish in CUT
        if not truncated and finish not in ENDED:
            raise _Again(f"finish_reason {shown(finish)}: not answered")
        # A reasoning model that used up its budget has no content: that is a truncated answer.
        if text is None and truncated:
            text = ""
        if not isinstance(text, str) or (not text.strip() and not truncated and not wish.allow_empty):
            raise _Again(f"an empty answer, finish_reason {shown(finish)} (--allow-empty counts it)")
        usage = plain.get("usage")
        counts = [_count(usage, name) for name in ("prompt_tokens", "completion_tokens")]
        return Reply(text.encode("utf-8", "replace").decode(), truncated, *counts)

    def _failed(self, what: str, item: str, fix: str) -> KvcqError:
        return EvaluationError(what, where=f"server {self.name}, {item}", fix=fix)


class _Absent(Exception):
    """HTTP 404 without an explanation: the path does not exist."""


def base_url(text: str) -> httpx2.URL:
    """Return the address below which the API lies: ``/v1`` if the URL has no path.

    Raises:
        InputError: not an http URL, or one that carries a password or a query.
    """
    try:
        url = httpx2.URL(text.strip())
    except (httpx2.InvalidURL, ValueError):
        url = httpx2.URL("")
    if url.scheme not in ("http", "https") or not url.host or not 0 < (url.port or 80) < 1 << 16:
        raise InputError(
            f"{shown(text)} is not a URL", where="--server", fix="write for example http://127.0.0.1:30000"
        )
    if url.userinfo or url.query or url.fragment:
        raise InputError("the URL carries more than an address", where="--server", fix="use --api-key-file for a key")
    return url.copy_with(path=url.path.rstrip("/") or "/v1")


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _message(data: bytes) -> str:
    """Return what a server says about a failure, briefly; empty if nothing readable."""
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError):
        return ""
    if isinstance(plain, dict):
        error = plain.get("error", plain)
        found = error.get("message") if isinstance(error, dict) else error
        found = found or plain.get("detail") or plain.get("message")
        if isinstance(found, str) and found != "Not Found":
            return found[:SHOWN_BODY]
    return ""


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None
