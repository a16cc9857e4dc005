"""Coroutines run to their end without losing a signal."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_async(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end; a signal cancels it cleanly before its handler is called.

    Of several signals the first one's handler is called.

    Raises:
        Whatever the coroutine or the handler raises.
    """
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(work)
    received: list[int] = []
    # A handler that raises in the middle of the event loop could be swallowed by it.
    handlers = {n: found for n in SIGNALS if callable(found := signal.getsignal(n))}

    async def guarded() -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

        def stop(number: int) -> None:
            received.append(number)
            task.cancel()

        for number in handlers:
            loop.add_signal_handler(number, stop, number)
        return await task

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        if not received:
            raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    handlers[signal.Signals(received[0])](received[0], None)
    raise KeyboardInterrupt
