"""Where words go: results to stdout, everything else to stderr, and a terminal is never assumed."""

from __future__ import annotations

import json as json_module
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kvcq.errors import visible

if TYPE_CHECKING:
    from kvcq.spec.report import Report

LINE_INTERVAL = 10.0
PIPE_WIDTH = 110
LEAST_WIDTH = 96


def tolerate_any_locale() -> None:
    """Let no character end a run: streams of a C or cp1252 locale replace what they cannot show."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, e.g. 2>&-
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def silence(stream: TextIO | None) -> None:
    """Send what is still written to a stream whose reader is gone nowhere; the interpreter flushes it at exit."""
    with suppress(OSError, ValueError):
        if stream is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Console:
    """Reporter of the CLI: a live bar on a terminal, one flushed line a stage elsewhere.

    Args:
        json: Print the result as exactly one JSON object on stdout.
        quiet: Print no progress, only warnings, errors and the result.
        verbose: Print every step of the progress, with the seconds since the start.
    """

    def __init__(self, *, json: bool = False, quiet: bool = False, verbose: bool = False) -> None:
        self._json = json
        self._quiet = quiet
        self._verbose = verbose
        self._interval = 0.0 if verbose else LINE_INTERVAL
        self._start = time.monotonic()
        self._live: Any = None
        self._task: Any = None
        self._stage = ""
        self._last = 0.0
        self._terminal = sys.stderr.isatty() and not quiet and not verbose

    def __enter__(self) -> Console:
        if self._terminal:
            from rich.console import Console as RichConsole
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._live = Progress(*columns, console=RichConsole(stderr=True), transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def stage(self, text: str) -> None:
        """Begin a stage."""
        self._stage = text
        self._last = time.monotonic()
        if self._live is not None:
            if self._task is not None:
                self._live.remove_task(self._task)
            self._task = self._live.add_task(text, total=None)
        elif not self._quiet:
            self._line(text)

    def settle(self) -> None:
        """End the live bar: what follows is told line by line."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def advance(self, done: int, total: int, unit: str) -> None:
        """Show progress: the bar, or a line now and then."""
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=done, total=total)
        elif not self._quiet and time.monotonic() - self._last >= self._interval:
            self._last = time.monotonic()
            self._line(f"{self._stage}: {done}/{total} {unit}")

    def note(self, text: str) -> None:
        """Tell something worth one line."""
        if not self._quiet:
            self._line(text)

    def warn(self, text: str) -> None:
        """Tell about a problem that does not stop the work."""
        self._line(f"warning: {text}")

    def result(self, text: str, payload: dict[str, Any]) -> None:
        """Print the result of the command, as text or as the one JSON object."""
        if self._json:
            text = json_module.dumps(payload, ensure_ascii=False, sort_keys=True)
        self._write(sys.stdout, text)

    def report(self, report: Report, footer: str, payload: dict[str, Any]) -> None:
        """Print a validation report as tables, in colour on a terminal, or as the one JSON object."""
        if self._json:
            self.result("", payload)
            return
        from rich.console import Console as RichConsole

        from kvcq.reports.terminal import print_report

        terminal = sys.stdout.isatty()
        # FORCE_COLOR must not put escapes into a pipe.
        console = RichConsole() if terminal else RichConsole(file=sys.stdout, width=PIPE_WIDTH, force_terminal=False)
        print_report(report, console)
        self._write(sys.stdout, footer)

    def _line(self, text: str) -> None:
        text = visible(text)
        if self._verbose:
            text = f"[{time.monotonic() - self._start:7.1f} s] {text}"
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            # Whoever read the progress may be gone: no reason to end an hour of work.
            try:
                self._write(sys.stderr, text)
            except BrokenPipeError:
                silence(sys.stderr)

    @staticmethod
    def _write(stream: TextIO, text: str) -> None:
        stream.write(text + "\n")
        stream.flush()
