"""A command in a process of its own that is forked: libraries that tests have loaded are not loaded again."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, NoReturn

from kvcq.cli import main

Pipe = tuple[int, int]


class Forked:
    """A command line in a child, with what tests use of `subprocess.Popen`; both streams are pipes.

    Args:
        words: The command line.
        environment: All variables of the child.
        encoding: Encoding of its streams, as PYTHONIOENCODING names it.
        prepare: Called in the child before the command.
    """

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        *,
        encoding: str = "utf-8",
        prepare: Callable[[], Any] = lambda: None,
    ) -> None:
        out, err = os.pipe(), os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _child([str(word) for word in words], environment, encoding, prepare, out, err)
        os.close(out[1])
        os.close(err[1])
        self.stdout: BinaryIO = os.fdopen(out[0], "rb")
        self.stderr: BinaryIO = os.fdopen(err[0], "rb")

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        if self.returncode is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            self.wait()
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        """Return the exit code; a child that is late is killed."""
        if self.returncode is None:
            late = threading.Timer(timeout, os.kill, (self.pid, signal.SIGKILL))
            late.start()
            # Not reaped yet, so that nobody else has its id when the timer is stopped.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            late.cancel()
            late.join()
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def communicate(self, timeout: float = 60.0) -> tuple[bytes, bytes]:
        """Return what is left in both streams, which are closed then, and set the exit code."""
        if self.stdout.closed:
            return b"", b""
        with ThreadPoolExecutor(2) as pool, self.stdout, self.stderr:
            parts = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
            self.wait(timeout)
            return parts[0].result(), parts[1].result()


def _child(
    words: list[str], environment: Mapping[str, str], encoding: str, prepare: Callable[[], Any], out: Pipe, err: Pipe
) -> NoReturn:
    code = 99
    # Collecting the parent's objects would copy its pages.
    gc.freeze()
    try:
        for (read, write), number in ((out, 1), (err, 2)):
            os.close(read)
            os.dup2(write, number)
            os.close(write)
        os.environ.clear()
        os.environ.update(environment)
        sys.stdin = sys.__stdin__ = open(os.devnull)  # noqa: PTH123, SIM115
        for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
            stream = os.fdopen(number, "w", encoding=encoding, errors=errors, closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        # Where tests run in the background these may be ignored from the start.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        sys.argv = ["kvcq", *words]
        prepare()
        main.run()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
