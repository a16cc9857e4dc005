"""The HTTP server around the app: its socket, its end, and what a signal means."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from kvcq.errors import InputError
from kvcq.runtime.hf.api.app import create_app
from kvcq.runtime.hf.api.service import Service

# Connections that still send after everything is answered or failed.
LAST_WORDS = 5
MOST_CONNECTIONS = 1024


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound and does not listen yet: whoever connects before the start is refused.

    Raises:
        InputError: no such address, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InputError(
            f"no address {host!r}: {error.strerror or error}",
            where="--host",
            fix="use an address of this machine, e.g. 127.0.0.1",
        ) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        fix = "choose another port, or 0 for a free one"
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}", where="--port", fix=fix) from None
    return bound


def url_of(bound: socket.socket, host: str) -> str:
    """Return the URL that clients use."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{bound.getsockname()[1]}"


class Server(uvicorn.Server):
    """Runs a service until a signal, or until its engine fails.

    At the first SIGINT or SIGTERM new requests are refused and running ones have `grace` seconds; at the second
    everything ends at once. The signal is raised again when the server is down, for whoever handled it before.

    Args:
        service: What is served; its engine is running.
        grace: Seconds.
        on_ready: Called when requests are accepted.
        on_closing: Called at the first signal, in its handler.
    """

    def __init__(
        self, service: Service, grace: float, on_ready: Callable[[], None], on_closing: Callable[[], None]
    ) -> None:
        config = uvicorn.Config(
            create_app(service),
            log_level="critical",
            access_log=False,
            lifespan="off",
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=int(grace) + LAST_WORDS,
            server_header=False,
        )
        super().__init__(config)
        self._engine, self._grace = service.engine, grace
        self._on_ready, self._on_closing = on_ready, on_closing

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Return True when it is time to end; an engine that is gone ends the server too."""
        return await super().on_tick(counter) or not self._engine.alive

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end, or end at once."""
        if self.should_exit:
            self.force_exit = True
            self._engine.close(0)
        else:
            super().handle_exit(sig, frame)
            self._engine.close(self._grace)
            self._on_closing()

    def stop(self, grace: float) -> None:
        """End without a signal; safe from any thread."""
        self._engine.close(grace)
        self.should_exit = True
