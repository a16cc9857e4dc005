"""The ``kvcq`` command: registers the verbs and turns every error into one line and its exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

from kvcq.cli import collect, diff, env, fit, inspect, methods, pack, quickstart, validate, verify
from kvcq.cli.console import tolerate_any_locale
from kvcq.errors import KvcqError
from kvcq.version import __version__

app = typer.Typer(
    name="kvcq",
    help="Fit, prove and pack 2-bit KV caches for HuggingFace causal language models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for verb in (quickstart, collect, fit, validate, pack, inspect, verify, diff, methods, env):
    app.command(name=verb.__name__.rpartition(".")[2])(verb.command)

# Typer bundles its own copy of click since 0.20: its public errors lead to the base class of either.
_ClickError: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


class Terminated(BaseException):
    """SIGTERM arrived."""


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


def _on_sigterm(*_: object) -> NoReturn:
    raise Terminated


def execute(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; prints at most one line for an error."""
    try:
        code = app(list(arguments), standalone_mode=False)
        return code if isinstance(code, int) else 0
    except typer.Exit as stop:
        return stop.exit_code
    except BrokenPipeError:
        # The reader went away (kvcq ... | head); a second error at interpreter exit would be noise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except BaseException as error:
        if "--debug" in arguments:
            import traceback

            traceback.print_exc()
        message, exit_code = explain(error)
        print("error: " + " ".join(message.split()), file=sys.stderr, flush=True)
        return exit_code


def explain(error: BaseException) -> tuple[str, int]:
    """Return the one line and the exit code of an error."""
    if isinstance(error, KvcqError):
        return str(error), error.exit_code
    if isinstance(error, _ClickError):
        return f"{error.format_message()} (kvcq --help shows the usage)", 2
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "interrupted: nothing half-written is left, run the same command again", 130
    if isinstance(error, Terminated):
        return "terminated: nothing half-written is left, run the same command again", 143
    if isinstance(error, MemoryError):
        return "out of memory: lower --seq-len or --chunk first, then --rows", 6
    return f"unexpected {type(error).__name__}: {error} (add --debug for the traceback)", 1


def run() -> NoReturn:
    """Entry point of the console script."""
    tolerate_any_locale()
    signal.signal(signal.SIGTERM, _on_sigterm)
    sys.exit(execute(sys.argv[1:]))
