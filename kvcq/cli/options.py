"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print every step with the seconds so far.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print the plan, write nothing.")]

Revision = Annotated[str | None, typer.Option(help="Hub revision: branch, tag or commit.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")]
Dtype = Annotated[str, typer.Option(help="auto (float32 on CPU, else the checkpoint's), float32, bfloat16, float16.")]
DeviceMap = Annotated[str | None, typer.Option(help="Spread layers over devices, e.g. auto.")]
RemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run model code from the checkpoint's repo.")]
Template = Annotated[str, typer.Option(help="auto (messages through the chat template, text raw), chat or raw.")]
ChatTemplate = Annotated[Path | None, typer.Option(help="File with a Jinja chat template to use instead.")]
TextColumn = Annotated[str | None, typer.Option(help="Field of jsonl or parquet rows that holds the text.")]
_DATA = typer.Option(
    help="Text: .txt, .md, .jsonl, .parquet, hf:NAME[:SPLIT], builtin:pydoc-topics, builtin:stdlib, - (stdin); "
    "repeat for more."
)
Data = Annotated[list[str], _DATA]
OptionalData = Annotated[list[str] | None, _DATA]


def choice(value: str, allowed: tuple[str, ...], flag: str) -> str:
    """Return `value` if it is allowed.

    Raises:
        InputError: otherwise, with what is allowed.
    """
    from kvcq.errors import InputError

    if value not in allowed:
        raise InputError(f"{value!r} is not allowed", where=flag, fix=f"use {', '.join(allowed)}")
    return value
