"""A server as a process of its own: its lines, its end, and how it is ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvcq.errors import UnavailableError

KEPT_LINES = 200
OWN, PARSER = "error: ", ": error: "
# How a traceback ends.
RAISED = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception)(?:: .+)?")
LINE_BYTES = 4096
KILL_SECONDS = 10.0


class Child:
    """A running command with everything that it starts.

    It has a session of its own: a Ctrl-C of the terminal reaches kvcq only, which then ends it in order.

    Args:
        command: Program and arguments.
        tell: Receives every line that it writes, on another thread.

    Raises:
        UnavailableError: the program cannot be started.
    """

    def __init__(self, command: Sequence[str], tell: Callable[[str], None]) -> None:
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise UnavailableError(f"cannot start {command[0]}: {error.strerror}", where="--engine sglang") from None
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._tell = tell
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the command, and of the process group that it leads."""
        return self._process.pid

    def ended(self) -> int | None:
        """Return its exit code as shells count it, 128 + n for signal n; None while it runs."""
        code = self._process.poll()
        return None if code is None else _shell(code)

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for its end and return `ended`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.ended()

    def reason(self) -> str | None:
        """Return why it ended: the last line that states an error, or ends a traceback; else its last line, if any."""
        lines = self.lines()
        for line in reversed(lines):
            # At the start of a line kvcq's plugin states it, and elsewhere argparse.
            if line.startswith(OWN):
                return line.removeprefix(OWN).strip()
            if PARSER in line:
                return line.partition(PARSER)[2].strip()
        raised = (line for line in reversed(lines) if RAISED.fullmatch(line.strip()))
        return next(raised, lines[-1] if lines else None)

    def after(self, mark: str) -> str | None:
        """Return what follows a text in the last of its lines that has it; None if no line does."""
        return next((line.partition(mark)[2].strip() for line in reversed(self.lines()) if mark in line), None)

    def said(self, text: str) -> bool:
        """Tell whether one of its last lines has this text, upper or lower case."""
        return any(text.lower() in line.lower() for line in self.lines())

    def lines(self) -> list[str]:
        """Return its last lines."""
        self._reader.join(1.0)
        return list(self._lines)

    def ask(self) -> None:
        """Ask it to end: SGLang answers what runs, then ends itself."""
        with suppress(ProcessLookupError):
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once with everything that it has started."""
        # The group outlives its leader: schedulers of a launcher that has died still hold the GPU.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(KILL_SECONDS)
        self._reader.join(1.0)

    def _read(self) -> None:
        stream = self._process.stdout
        if stream is None:
            return
        while data := stream.readline(LINE_BYTES):
            # Of a progress bar, what it shows in the end.
            line = data.decode("utf-8", "replace").rstrip().rpartition("\r")[2]
            if not line:
                continue
            self._lines.append(line)
            # Whatever happens to the reader of the lines: a full pipe would stop the server.
            with suppress(Exception):
                self._tell(line)
        stream.close()


def _shell(code: int) -> int:
    return 128 - code if code < 0 else code
