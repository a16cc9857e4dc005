"""kvcq inspect."""

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
    """Describe an artifact: model, method, layers, bits, digests.

    Example: kvcq inspect smollm2-nova.kvcq
    """
    from kvcq.pipeline.inspect import inspect

    result = inspect(path)
    Console(json=json).result(result.text(), result.payload())
