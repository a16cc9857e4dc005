"""kvcq pack."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcq.cli.console import Console
from kvcq.cli.options import Debug, DryRun, Force, Json, Quiet, Verbose


def command(
    fit: Annotated[Path, typer.Argument(help="Folder written by kvcq fit.")],
    report: Annotated[Path, typer.Option(help="Folder written by kvcq validate.")],
    out: Annotated[Path, typer.Option(help="Bundle to write, NAME.kvcq.")],
    archive: Annotated[bool, typer.Option("--archive", help="Write one file instead of a folder.")] = False,
    force: Force = False,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Seal a fit and its report into a versioned, checksummed bundle; computes nothing new.

    Example: kvcq pack fit/ --report report/ --out smollm2-nova.kvcq
    """
    from kvcq.pipeline.pack import pack
    from kvcq.pipeline.requests import PackRequest

    request = PackRequest(fit=fit, report=report, out=out, archive=archive, force=force, dry_run=dry_run)
    with Console(json=json, quiet=quiet, verbose=verbose) as console:
        result = pack(request, console)
    console.result(result.text(), result.payload())
