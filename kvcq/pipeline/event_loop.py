"""Coroutines run to their end without losing a signal."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from contextlib import suppress
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
    # A handler that raises in the middle of the event loop could be swallowed by it. Those of the loop itself would
    # be gone, and not yet replaced, for a moment at its end.
    handlers = {n: found for n in SIGNALS if callable(found := signal.getsignal(n))}

    async def guarded() -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

        def stop(number: int, _: object) -> None:
            received.append(number)
            # The loop may be over by now.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(task.cancel)

        for number in handlers:
            signal.signal(number, stop)
        return await task

    try:
        result = asyncio.run(guarded())
    except BaseException:
        if not received:
            raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if not received:
        return result
    handlers[signal.Signals(received[0])](received[0], None)
    raise KeyboardInterrupt
