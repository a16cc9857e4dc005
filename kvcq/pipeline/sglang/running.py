"""A server from its start to its end: waiting, proof, signals, and the table that it is started with."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from kvcq.artifacts.bundle import Bundle
from kvcq.errors import EvaluationError, Interrupted, MismatchError
from kvcq.models.outline import Outline
from kvcq.pipeline.capacity import layer_lines
from kvcq.pipeline.progress import Reporter
from kvcq.pipeline.ready import Ready
from kvcq.pipeline.sglang.child import Child
from kvcq.pipeline.sglang.client import Client, NoAnswer
from kvcq.pipeline.sglang.failure import early_end
from kvcq.pipeline.sglang.machine import Machine
from kvcq.pipeline.sglang.memory import Memory
from kvcq.pipeline.sglang.proof import AGAIN, Proof, prove
from kvcq.pipeline.sglang.request import SglangRequest
from kvcq.reports.text import plural, ranges, size

POLL_SECONDS = 0.2
END_SECONDS = 5.0
# Where a failure may be that of a connection, and may not.
BROKEN_SECONDS = 1.0


@dataclass(frozen=True)
class Served:
    """What is served, and where; without `canary` its answers prove nothing, and only what it says is checked."""

    request: SglangRequest
    bundle: Bundle
    outline: Outline
    machine: Machine
    memory: Memory
    canary: bool = True

    def lines(self, proof: Proof) -> list[str]:
        """Return the table of a server that has proven itself."""
        manifest, windows, pool = self.bundle.manifest, self.bundle.manifest.recipe.windows, self.memory.pool
        where = f"SGLang {self.machine.sglang} on {self.memory.ranks} x {self.machine.gpus[0].name}"
        bf16 = self.memory.bf16_cell * self.memory.ranks
        backends = sorted(set(proof.kernels.values()))
        rows = [
            ("bundle", f"{self.request.bundle.name}, {manifest.recipe.method}, digest {manifest.digest[:16]}"),
            ("model", f"{self.outline.source.label}, {where}"),
            *(("layers", line) for line in layer_lines(manifest)),
            (
                "exact",
                f"the first {windows.sink} and the last {windows.recent} tokens, "
                f"{size(pool.request_bytes * self.memory.ranks)} a request",
            ),
            ("cache", f"{proof.bytes_per_token} bytes a token as computed, {bf16} in BF16"),
            (
                "capacity",
                f"{proof.capacity} tokens, {plural(pool.requests, 'request')} at once; BF16 holds "
                f"{self.memory.beside(proof.capacity)} in the same memory",
            ),
            *(
                ("kernels", f"{name}: {ranges(layer for layer, own in proof.kernels.items() if own == name)}")
                for name in backends
            ),
        ]
        if proof.statistic is None:
            rows.append(("canary", "not asked: weights are random"))
        else:
            rows.append(("prefix", f"{proof.cached} tokens of the canary read from the radix cache"))
            rows.append(("canary", f"{proof.statistic:.2f}, active"))
        return [f"{label}: {value}" for label, value in rows]

    def record(self, proof: Proof) -> dict[str, Any]:
        """Return the same for machines."""
        manifest = self.bundle.manifest
        return {
            "model": self.request.served_name or self.outline.source.label,
            "digest": manifest.digest,
            "bundle": self.request.bundle.name,
            "method": manifest.recipe.method,
            "windows": manifest.recipe.windows.plain(),
            "canary": proof.statistic,
            "capacity_tokens": proof.capacity,
            "bytes_per_token": proof.bytes_per_token,
            "kernels": {str(layer): name for layer, name in sorted(proof.kernels.items())},
            "engine": "sglang",
            "sglang": self.machine.sglang,
        }


def run(
    served: Served,
    command: Sequence[str],
    port: int,
    key: str | None,
    token: str,
    on_ready: Callable[[Ready], None] | None,
    reporter: Reporter,
) -> int:
    """Start a server, prove it, and stay until it ends.

    Args:
        served: What is served.
        command: That starts the server.
        port: That it will listen on.
        key: Bearer token that it wants.
        token: Of its gate, which is opened once it has proven itself.
        on_ready: Called once it has proven itself.
        reporter: Receives its lines and the table.

    Returns:
        Its exit code, 0 after ``Ready.stop``.

    Raises:
        KvcqError: it ended before it was ready, or did not prove that the bundle is on; it does not run any more then.
        Interrupted: a signal; likewise.
    """
    request = served.request

    def ready(child: Child, client: Client, stop: Callable[[float], None], seconds: float) -> None:
        reporter.stage("proving that the bundle is on")
        proof = _proven(child, client, served)
        for line in served.lines(proof):
            reporter.note(line)
        if on_ready is not None:
            on_ready(Ready(client.url, served.record(proof) | {"url": client.url, "seconds": round(seconds, 1)}, stop))

    start = Start(tuple(command), request.host, port, key, request.start_seconds, request.grace, token)
    return watch(start, ready, reporter)


@dataclass(frozen=True)
class Start:
    """How a server is started and reached.

    Attributes:
        command: That starts it.
        host: That it will listen on.
        port: Likewise.
        key: Bearer token that it wants.
        seconds: Longest time until it answers.
        grace: Seconds that running requests have after a signal.
        token: Of its gate; None: it has none.
    """

    command: tuple[str, ...]
    host: str
    port: int
    key: str | None = None
    seconds: float = 3600.0
    grace: float = 10.0
    token: str | None = None


WhenUp = Callable[[Child, Client, Callable[[float], None], float], None]


def watch(start: Start, when_up: WhenUp, reporter: Reporter) -> int:
    """Start a server and stay until it ends; whatever happens, it does not run afterwards.

    Args:
        start: How.
        when_up: Called once it answers, with the process, a client, what ends it within so many seconds, and the
            seconds that its start took.
        reporter: Receives its lines.

    Returns:
        Its exit code, 0 after it was asked to end.

    Raises:
        KvcqError: it ended before it was ready, or `when_up` raised it; where a request failed because the server has
            ended, the error says why it has.
        Interrupted: a signal.
    """
    reporter.stage("starting SGLang")
    started, stopped = time.monotonic(), threading.Event()

    def stop(grace: float) -> None:
        stopped.set()
        _stop(child, grace)

    with _signals():
        child = Child(start.command, reporter.note)
        try:
            with Client(start.host, start.port, start.key, start.token) as client:
                if not client.wait(lambda: child.ended() is None, start.seconds):
                    _not_up(child, start.seconds)
                try:
                    when_up(child, client, stop, time.monotonic() - started)
                except EvaluationError as error:
                    # A broken connection is seen before the end that broke it.
                    code = child.wait(END_SECONDS if isinstance(error, NoAnswer) else BROKEN_SECONDS)
                    if code is None or stopped.is_set():
                        raise
                    raise EvaluationError(_end(child, code), where="sglang", fix="see its lines above") from None
            while (ended := child.wait(POLL_SECONDS)) is None:
                pass
            if stopped.is_set():
                return 0
            if ended:
                reporter.warn(_end(child, ended))
            return ended
        except Interrupted as error:
            if start.grace:
                reporter.note(f"SGLang has up to {start.grace:g} s to end; a second signal ends it at once")
            _stop_by_signal(child, start.grace)
            error.add_note("the server has shut down")
            raise
        finally:
            child.kill()


def _end(child: Child, code: int) -> str:
    reason = child.reason()
    return f"SGLang ended with exit code {code}" + (f": {reason}" if reason else "")


def _not_up(child: Child, seconds: float) -> NoReturn:
    code = child.ended()
    if code is not None:
        raise early_end(child, code)
    raise MismatchError(f"SGLang did not answer within {seconds:g} s", where="sglang", fix="see its lines above")


def _proven(child: Child, client: Client, served: Served) -> Proof:
    """Return the proof of a server, which is then open and still runs: else the reason of its end says more."""
    try:
        with _mismatch():
            client.check_shut()
        proof = prove(client, served.bundle, served.memory, canary=served.canary)
        with _mismatch():
            client.open()
    except MismatchError as error:
        # A broken connection is seen before the end that broke it.
        if (code := child.wait(END_SECONDS if isinstance(error.__cause__, NoAnswer) else 0.0)) is not None:
            raise early_end(child, code) from None
        raise
    if (code := child.ended()) is not None:
        raise early_end(child, code)
    return proof


@contextmanager
def _mismatch() -> Iterator[None]:
    try:
        yield
    except EvaluationError as error:
        raise MismatchError(error.what, where=error.where, fix=AGAIN) from error


def _stop(child: Child, grace: float) -> None:
    child.ask()
    if child.wait(grace) is None:
        child.kill()


def _stop_by_signal(child: Child, grace: float) -> None:
    """End the server; another signal meanwhile ends it without waiting."""
    at_once = threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: at_once.set())
    end = time.monotonic() + grace
    child.ask()
    while child.ended() is None and not at_once.is_set() and time.monotonic() < end:
        child.wait(POLL_SECONDS)
    child.kill()


@contextmanager
def _signals() -> Iterator[None]:
    """Let a closed terminal end the server in order too: it would be left running, in a session of its own."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGHUP) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGHUP, _hung_up)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _hung_up(number: int, _: object) -> NoReturn:
    raise Interrupted(number)
