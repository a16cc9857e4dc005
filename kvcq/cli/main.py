"""The ``kvcq`` command: registers the verbs and turns every error into one line and its exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

from kvcq.cli import bench, collect, diff, env, fit, inspect, merge, methods, pack, quickstart, serve, validate, verify
from kvcq.cli.console import silence, tolerate_any_locale
from kvcq.errors import Interrupted, KvcqError
from kvcq.version import __version__

app = typer.Typer(
    name="kvcq",
    help="Fit, prove and pack 2-bit KV caches for HuggingFace causal language models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for verb in (quickstart, collect, merge, fit, validate, pack, serve, inspect, verify, diff, methods, bench, env):
    if verb is bench:
        app.add_typer(bench.app, name="bench", short_help=bench.HELP)
        continue
    # The whole first sentence: click would cut it at the width of the list.
    summary = " ".join((verb.command.__doc__ or "").partition("\n\n")[0].split())
    app.command(name=verb.__name__.rpartition(".")[2], short_help=summary)(verb.command)

# Typer bundles its own copy of click since 0.20: its public errors lead to the base class of either.
_ClickError: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


INTERRUPTED, TERMINATED = 130, 143
AGAIN = "nothing half-written is left, run the same command again"


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"kvcq {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Fit, prove and pack 2-bit KV caches for HuggingFace causal language models."""


def _on_signal(number: int, _: object) -> NoReturn:
    # The second one does not wait for anything; the next command clears up.
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_DFL)
    raise Interrupted(number)


def execute(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; prints at most one line for an error."""
    try:
        code = app(list(arguments) or ["--help"], prog_name="kvcq", standalone_mode=False)
        if code == INTERRUPTED:  # Typer turns Ctrl-C into this return value
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except typer.Exit as stop:
        return stop.exit_code
    except BaseException as error:
        if isinstance(error, BrokenPipeError | SystemExit) and _reader_left():
            # A second error at interpreter exit would be noise.
            silence(sys.__stdout__)
            return 0
        if "--debug" in arguments:
            import traceback

            traceback.print_exc()
        message, exit_code = explain(error)
        print("error: " + " ".join(message.split()), file=sys.stderr, flush=True)
        return exit_code


def _reader_left() -> bool:
    """Return True for ``kvcq ... | head``: nothing more can be written to stdout.

    Typer and Rich turn the broken pipe into a `SystemExit`; a connection may break with the same error, so ask.
    """
    try:
        os.write(1, b"\n")
    except OSError:
        return True
    return False


def explain(error: BaseException) -> tuple[str, int]:
    """Return the one line and the exit code of an error."""
    if isinstance(error, KvcqError):
        return str(error), error.exit_code
    if isinstance(error, _ClickError):
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "kvcq"
        return f"{error.format_message()} ({command} --help shows the usage)", 2
    if isinstance(error, Interrupted):
        what = "terminated" if error.exit_code == TERMINATED else "interrupted"
        return f"{what}: {'; '.join(getattr(error, '__notes__', [AGAIN]))}", error.exit_code
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return f"interrupted: {AGAIN}", INTERRUPTED
    if _out_of_memory(error):
        return "out of memory: lower --seq-len or --chunk first, then --rows", 6
    return f"unexpected {type(error).__name__}: {error} (add --debug for the traceback)", 1


def _out_of_memory(error: BaseException) -> bool:
    """Recognise an exhausted allocator; torch is not imported here, and on the CPU it raises a plain RuntimeError."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def run() -> NoReturn:
    """Entry point of the console script."""
    tolerate_any_locale()
    signal.signal(signal.SIGTERM, _on_signal)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in the background, where it is ignored
        signal.signal(signal.SIGINT, _on_signal)
    sys.exit(execute(sys.argv[1:]))
