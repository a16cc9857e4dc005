"""kvcq merge."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcq.cli.console import Console
from kvcq.cli.options import Debug, DryRun, Force, Json, Quiet


def command(
    stats: Annotated[list[Path], typer.Argument(help="All shards of one collection, in any order.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("stats"),
    force: Force = False,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Join the shards of kvcq collect --shard into the statistics of one run, byte for byte.

    Example: kvcq merge shard0/ shard1/ --out stats/
    """
    from kvcq.pipeline.merge import merge
    from kvcq.pipeline.requests import MergeRequest

    request = MergeRequest(stats=tuple(stats), out=out, force=force, dry_run=dry_run)
    with Console(json=json, quiet=quiet) as console:
        result = merge(request, console)
    console.result(result.text(), result.payload())
