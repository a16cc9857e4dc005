"""kvcq quickstart."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcq.cli.console import Console
from kvcq.cli.options import Debug, Force, Json, Quiet, Verbose


def command(
    model: Annotated[str, typer.Option(help="Model to use; the default needs no model hub.")] = "smollm2-135m",
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("quickstart"),
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Run the whole chain on a small real model: collect, fit five methods, validate, pack, verify.

    Example: kvcq quickstart --out quickstart/
    """
    from kvcq.pipeline.quickstart import check_order, quickstart
    from kvcq.pipeline.requests import QuickstartRequest

    with Console(json=json, quiet=quiet, verbose=verbose) as console:
        result = quickstart(QuickstartRequest(model=model, out=out, force=force), console)
    console.report(result.validated.report, result.text(), result.payload())
    if model == QuickstartRequest.model:
        check_order(result)
