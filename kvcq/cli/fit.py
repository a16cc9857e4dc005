"""kvcq fit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcq.cli.console import Console
from kvcq.cli.options import Debug, DryRun, Force, Json, Quiet, Verbose
from kvcq.cli.values import parse_length


def command(
    stats: Annotated[Path, typer.Argument(help="Folder written by kvcq collect.")],
    method: Annotated[str | None, typer.Option(help="Method name; kvcq methods lists them.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="YAML recipe.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value: a recipe field (windows.sink=64, skip_layers=0,1) or a parameter."),
    ] = None,
    skip_layers: Annotated[str | None, typer.Option(help="Layer ids to keep in BF16, e.g. 0,1.")] = None,
    target_context: Annotated[
        str | None, typer.Option(help="Average the statistics over positions below this length, e.g. 32k.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("fit"),
    force: Force = False,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Fit transforms and quantizers to statistics; needs no model.

    Example: kvcq fit stats/ --method nova --target-context 32k --out fit/
    """
    from kvcq.pipeline.fit import fit
    from kvcq.pipeline.requests import FitRequest

    request = FitRequest(
        stats=stats,
        out=out,
        method=method,
        recipe=recipe,
        settings=(*(settings or ()), *(() if skip_layers is None else (f"skip_layers={skip_layers}",))),
        target_context=None if target_context is None else parse_length(target_context, "--target-context"),
        force=force,
        dry_run=dry_run,
    )
    with Console(json=json, quiet=quiet, verbose=verbose) as console:
        result = fit(request, console)
    console.result(result.text(), result.payload())
