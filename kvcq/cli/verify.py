"""kvcq verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcq.cli.console import Console
from kvcq.cli.options import Debug, Json


def command(
    path: Annotated[Path, typer.Argument(help="A bundle, or a stats, fit or report folder.")],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check every byte of an artifact against its manifest, and its tensors for sense.

    Example: kvcq verify smollm2-nova.kvcq
    """
    from kvcq.pipeline.inspect import verify

    result = verify(path)
    Console(json=json).result(result.text(), result.payload())
