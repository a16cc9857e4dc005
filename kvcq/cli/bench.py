"""kvcq bench: kernels and servers, each timed beside BF16."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcq.cli import bench_serve
from kvcq.cli.console import Console
from kvcq.cli.options import Debug, DryRun, Force, Json, Quiet, Verbose
from kvcq.cli.values import split_items
from kvcq.errors import EvaluationError

HELP = "Time kernels, or servers, beside BF16 on this machine."
EXAMPLE = "Example: kvcq bench kernels --shapes 32x32k --out kernels.json"
app = typer.Typer(help=f"{HELP}\n\n{EXAMPLE}", no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.command(name="kernels")
def kernels(
    shapes: Annotated[
        str | None,
        typer.Option(help="Decode shapes BATCHxCONTEXT[@D[:QHEADS/KVHEADS]], e.g. 1x32k,32x32k,32x32k@64:64/8."),
    ] = None,
    ops: Annotated[
        str, typer.Option(help="check (ragged batches of all codecs), decode, write, extend.")
    ] = "check,decode,write,extend",
    codecs: Annotated[str, typer.Option(help="What is timed: int2, vq, int2x4, vqx4 (four scales a row).")] = "int2,vq",
    peer: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FILE.py: time a foreign kernel too; the file defines prepare(shape). Repeat for more."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Replays of each timing; the median counts.", min=1)] = 10,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    force: Force = False,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Check this machine's kernels against float64, then time them beside BF16 attention.

    Prints Markdown tables. A kernel that is wrong is not timed, and the command ends with 1; so it does when a check
    of a ragged batch is not right.

    Example: kvcq bench kernels --shapes 32x32k --out kernels.json
    """
    from kvcq.pipeline.bench.run import bench
    from kvcq.pipeline.requests import BenchRequest

    request = BenchRequest(
        shapes=split_items(shapes),
        ops=split_items(ops),
        codecs=split_items(codecs),
        peers=tuple(peer or ()),
        repeats=repeats,
        out=out,
        force=force,
        dry_run=dry_run,
    )
    with Console(json=json, quiet=quiet, verbose=verbose) as console:
        result = bench(request, console)
    console.result(result.text(), result.payload())
    if result.problems:
        count = len(result.problems)
        raise EvaluationError(
            f"{count} {'result is' if count == 1 else 'results are'} wrong or missing, first {result.problems[0]}",
            where="bench kernels",
        )


app.command(name="serve")(bench_serve.command)
