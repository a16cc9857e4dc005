"""What `kvcq serve` asks of the SGLang that it has started, over HTTP on this machine."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx2

from kvcq.errors import EvaluationError, shown
from kvcq.runtime.sglang.gate import HEADER, OPEN, REASON

HEALTH_SECONDS = 60.0
ANSWER_SECONDS = 300.0
POLL_SECONDS = 0.5
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where to ask a server that listens everywhere


class NoAnswer(EvaluationError):
    """The connection broke, or nobody listens."""


@dataclass(frozen=True)
class Scored:
    """An answer to a prompt with log-probabilities.

    Attributes:
        cached: Tokens of the prompt that were read from the radix cache.
        rows: Log-probs of the ids that were asked for, by position from the one where they start.
    """

    cached: int
    rows: list[dict[int, float]]


def listens(host: str, port: int) -> bool:
    """Tell whether somebody listens on a port of this machine.

    A connection to a port that nobody listens on yet may be given that port as its own, and be answered by itself; it
    would keep the server from listening there, too.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
        trial.settimeout(HEALTH_SECONDS)
        try:
            trial.bind(("", 0))
            if trial.getsockname()[1] == port:
                return False
            trial.connect((host, port))
        except OSError:
            return False
        return True


class Client:
    """One server.

    Args:
        host: Address that it listens on.
        port: Its port.
        key: Sent as bearer token, where the server wants one.
        token: Sent to its gate, where it has one.
    """

    def __init__(self, host: str, port: int, key: str | None = None, token: str | None = None) -> None:
        where = WILDCARDS.get(host, host)
        self._where = where, port
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        if token is not None:
            headers[HEADER] = token
        # No proxy of the environment reaches a port of this machine.
        self._http = httpx2.Client(
            base_url=f"http://[{where}]:{port}" if ":" in where else f"http://{where}:{port}",
            headers=headers,
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    @property
    def url(self) -> str:
        """Address of the server."""
        return str(self._http.base_url).rstrip("/")

    def wait(self, alive: Callable[[], bool], seconds: float) -> bool:
        """Wait until the server answers that it is well.

        Args:
            alive: Asked before every attempt; the wait ends when it is not.
            seconds: Longest time.

        Returns:
            True when it is well, False when it died or the time is over.
        """
        end = time.monotonic() + seconds
        while alive() and time.monotonic() < end:
            try:
                # SGLang answers after a token has been generated, which takes a second at least.
                if listens(*self._where) and self._http.get("/health", timeout=HEALTH_SECONDS).status_code == 200:
                    return alive()
            except httpx2.HTTPError:
                pass
            time.sleep(POLL_SECONDS)
        return False

    def check_shut(self) -> None:
        """Check that the gate is in place: without the token there is no answer.

        Raises:
            EvaluationError: there is one, or the connection broke.
        """
        asked = self._http.build_request("GET", "/health", timeout=HEALTH_SECONDS)
        asked.headers.pop(HEADER, None)
        try:
            answer = self._http.send(asked)
        except httpx2.HTTPError as error:
            raise self._no_answer("/health", error) from None
        if answer.status_code != 503 or REASON not in answer.text:
            raise EvaluationError("the server answers before it has proven itself", where=f"{self.url}/health")

    def open(self) -> None:
        """Open the gate to everybody.

        Raises:
            EvaluationError: it did not say so.
        """
        if self._json("POST", OPEN, None) != {"open": True}:
            raise EvaluationError("the gate did not open", where=f"{self.url}{OPEN}")

    def info(self) -> dict[str, Any]:
        """Return what the server says of itself and its schedulers.

        Raises:
            EvaluationError: no answer, or not one.
        """
        return self._json("GET", "/server_info", None)

    def score(self, tokens: Sequence[int], start: int | None = None, ids: Sequence[int] = ()) -> Scored:
        """Let the server read a prompt.

        Args:
            tokens: The prompt.
            start: Position of the first log-probs; None asks for none.
            ids: Tokens whose log-probs are asked for, at every position from `start` to the last but one.

        Raises:
            EvaluationError: no answer, or not one.
        """
        body: dict[str, Any] = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        }
        if start is not None:
            body |= {"return_logprob": True, "logprob_start_len": start, "token_ids_logprob": list(ids)}
        answer = self._json("POST", "/generate", body)
        try:
            meta = answer["meta_info"]
            cached = int(meta["cached_tokens"])
            # The first entry belongs to the token at `start` itself, whose log-prob would need the position before.
            entries = meta["input_token_ids_logprobs"][1:] if start is not None else []
            rows = [{int(entry[1]): float(entry[0]) for entry in row} for row in entries]
        except (KeyError, IndexError, TypeError, ValueError):
            raise _not_an_answer("/generate", answer) from None
        return Scored(cached, rows)

    def _json(self, method: str, place: str, body: Any) -> Any:
        try:
            answer = self._http.request(method, place, json=body, timeout=ANSWER_SECONDS)
        except httpx2.HTTPError as error:
            raise self._no_answer(place, error) from None
        if answer.status_code != 200:
            raise EvaluationError(f"HTTP {answer.status_code}: {shown(answer.text)}", where=f"{self.url}{place}")
        try:
            plain = answer.json()
        except (ValueError, RecursionError):
            plain = None
        if not isinstance(plain, dict):
            raise _not_an_answer(place, answer.text)
        return plain

    def _no_answer(self, place: str, error: Exception) -> NoAnswer:
        return NoAnswer(f"no answer: {error or type(error).__name__}", where=f"{self.url}{place}")


def _not_an_answer(place: str, said: Any) -> EvaluationError:
    return EvaluationError(f"not an answer of SGLang: {shown(said)}", where=place)
