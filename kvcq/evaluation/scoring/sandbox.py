"""Generated code in a process of its own, with limits against accidents. It is no defence against hostile code.

The process is ``python -I`` in an empty temporary folder with an empty environment. It may use a number of CPU seconds
and bytes of memory, write small files in its folder, and start no process; signals, network and writes elsewhere are
denied by an audit hook. When the time is over its process group is killed.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvcq.errors import EvaluationError, UnsupportedError

CHILD = Path(__file__).with_name("confined.py")
MEMORY = 2 << 30
FILE_SIZE = 16 << 20
LAST_LINE = 120


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        finished: It came to its own end: not stopped, no exception, no early exit.
        exit_code: Of the process, negative for a signal; None when its time was over.
        stdout: What it printed, at most 16 MiB.
        note: The last line of its traceback, or what stopped it; empty for a quiet end.
    """

    finished: bool
    exit_code: int | None
    stdout: str
    note: str


def require_sandbox() -> None:
    """Refuse on systems without process limits.

    Raises:
        UnsupportedError: not a POSIX system.
    """
    if os.name != "posix":
        raise UnsupportedError("code is run on Linux and macOS only", where="--allow-code-execution")


def run_program(
    source: str, *, stdin: str = "", main: bool = False, seconds: float = 10.0, memory: int = MEMORY
) -> Outcome:
    """Run Python source and wait for it.

    Args:
        source: The program.
        stdin: What it reads.
        main: Run it as ``__main__``; otherwise its main guard stays off.
        seconds: Wall-clock limit, and limit of CPU time rounded up.
        memory: Limit of the address space in bytes.

    Raises:
        EvaluationError: the process cannot be started.
    """
    proof = secrets.token_hex(16)
    # A program that ends itself must not kill the file of its output: it lies where it cannot reach.
    with tempfile.TemporaryDirectory(prefix="kvcq-code-") as outer:
        folder = Path(outer) / "work"
        folder.mkdir()
        (folder / "program.py").write_bytes(source.encode("utf-8", "surrogatepass"))
        (Path(outer) / "stdin").write_bytes(stdin.encode("utf-8", "surrogatepass"))
        name = "__main__" if main else "solution"
        limits = [str(int(seconds) + 1), str(memory), str(FILE_SIZE)]
        command = [sys.executable, "-I", "-X", "utf8", str(CHILD), str(folder), *limits, name, proof]
        code = _wait(command, Path(outer), folder, seconds)
        stdout = _read(Path(outer) / "stdout")
        note = "time limit" if code is None else _note(code, _read(Path(outer) / "stderr"))
        written = folder / "proof"
        finished = code == 0 and written.is_file() and written.read_text(errors="replace") == proof
        return Outcome(finished, code, stdout, note)


def _wait(command: list[str], outer: Path, folder: Path, seconds: float) -> int | None:
    """Run the command and return its exit code, or None when its time was over; its process group is gone after."""
    with (
        (outer / "stdin").open("rb") as given,
        (outer / "stdout").open("wb") as out,
        (outer / "stderr").open("wb") as err,
    ):
        try:
            child = subprocess.Popen(
                command, cwd=folder, env={}, stdin=given, stdout=out, stderr=err, close_fds=True, start_new_session=True
            )
        except OSError as error:
            raise EvaluationError(
                f"generated code cannot be started: {error}", where="--allow-code-execution"
            ) from None
        try:
            return child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _note(code: int, stderr: str) -> str:
    if code < 0:
        number = -code
        return "time limit" if number in (signal.SIGXCPU, signal.SIGKILL) else f"ended by signal {number}"
    lines = stderr.strip().splitlines()
    return lines[-1][:LAST_LINE] if code and lines else ""


def _read(path: Path) -> str:
    return path.read_bytes()[: FILE_SIZE + 1].decode("utf-8", "replace")
