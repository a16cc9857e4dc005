"""A server of this process in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Background:
    """What a server told when it was ready, and what it returned or raised once it has stopped."""

    ready: Any = None
    result: Any = None


@contextmanager
def in_background(serve: Callable[[Callable[[Any], None]], Any], grace: float) -> Iterator[Background]:
    """Run ``serve(on_ready)`` until the block ends; raise what it raises instead of becoming ready."""
    running, changed, told = Background(), threading.Event(), []

    def on_ready(server: Any) -> None:
        told.append(server)
        changed.set()

    def run() -> None:
        try:
            running.result = serve(on_ready)
        except BaseException as error:
            running.result = error
        finally:
            changed.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert changed.wait(120)
    if not told:
        thread.join(60)
        raise running.result
    (running.ready,) = told
    try:
        yield running
    finally:
        running.ready.stop(grace)
        thread.join(60)
