"""kvcq diff."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcq.cli.console import Console
from kvcq.cli.options import Debug, Json


def command(
    a: Annotated[Path, typer.Argument(help="An artifact.")],
    b: Annotated[Path, typer.Argument(help="Another artifact.")],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the differences between two artifacts; exits 0 either way.

    Example: kvcq diff old.kvcq new.kvcq
    """
    from kvcq.pipeline.inspect import diff

    result = diff(a, b)
    Console(json=json).result(result.text(), result.payload())
