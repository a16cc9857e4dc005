"""kvcq bench serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcq.cli.console import Console
from kvcq.cli.options import Debug, DryRun, Force, Json, Quiet, Verbose
from kvcq.cli.values import parse_length, split_items
from kvcq.errors import EvaluationError

CELLS = "BATCHxINPUT, comma-separated"


def command(
    arguments: Annotated[list[str] | None, typer.Argument(help="Flags for SGLang, after --, for every server.")] = None,
    model: Annotated[str | None, typer.Option(help="The model that bundles were fitted for.")] = None,
    bundle: Annotated[list[Path] | None, typer.Option(help="Bundle, NAME.kvcq; repeat for more.")] = None,
    bf16: Annotated[
        str, typer.Option(help="Attention backends that BF16 is served with; the best one counts.")
    ] = "triton,flashinfer",
    synthetic: Annotated[
        str | None, typer.Option(help="qwen3-8b or qwen3-4b: random weights and bundles instead of a model.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the synthetic model.", min=1)] = None,
    kinds: Annotated[str, typer.Option(help="Bundles of the synthetic model: int2, vq.")] = "int2,vq",
    cells: Annotated[
        str | None, typer.Option(help=f"Decode speed: {CELLS}, e.g. 1x90k,fullx30k (full: all that the pool holds).")
    ] = None,
    prompts: Annotated[str | None, typer.Option(help=f"Prefill speed: {CELLS}, always prefilled.")] = None,
    hits: Annotated[
        str | None, typer.Option(help=f"Speed at prefix hits of 0, 50 and about 100 %: {CELLS}, always prefilled.")
    ] = None,
    jobs: Annotated[str | None, typer.Option(help=f"Wall time of so many requests: {CELLS}.")] = None,
    splits: Annotated[
        str | None, typer.Option(help=f"GEMM, attention, quantizing and rest of a step, by profiler: {CELLS}.")
    ] = None,
    filled: Annotated[
        bool, typer.Option("--filled", help="Put random rows where contexts would be prefilled, in every server alike.")
    ] = False,
    output: Annotated[int, typer.Option(help="Tokens that each request generates.", min=1)] = 256,
    job_output: Annotated[int, typer.Option(help="Likewise in jobs.", min=1)] = 1024,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.", min=0)] = 0,
    max_running: Annotated[int, typer.Option(help="Requests that a server runs at once.", min=1)] = 128,
    max_context: Annotated[str | None, typer.Option(help="Most tokens of a request, e.g. 100k.")] = None,
    dtype: Annotated[str, typer.Option(help="auto or bfloat16.")] = "auto",
    bandwidth: Annotated[
        float | None,
        typer.Option(help="Read rate of a GPU's memory for the bounds, GB/s; that of an H200 if left out."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file, written anew after every cell.")] = None,
    charts: Annotated[Path | None, typer.Option(help="Folder for SVG files.")] = None,
    force: Force = False,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Serve BF16 and bundles with SGLang in turn on this machine, and time what each does.

    Prints Markdown tables. What does not start or fails is told, and the command ends with 1.

    Example: kvcq bench serve --synthetic qwen3-8b --layers 12 --cells 1x90k,4x90k,fullx30k --filled --out serve.json
    """
    from kvcq.pipeline.bench_serve.request import ServeBenchRequest
    from kvcq.pipeline.bench_serve.run import bench_serve
    from kvcq.pipeline.requests import BOUND_GBS

    request = ServeBenchRequest(
        model=model,
        bundles=tuple(bundle or ()),
        bf16=split_items(bf16),
        synthetic=synthetic,
        layers=layers,
        kinds=split_items(kinds),
        cells=split_items(cells),
        prompts=split_items(prompts),
        hits=split_items(hits),
        jobs=split_items(jobs),
        splits=split_items(splits),
        filled=filled,
        output=output,
        job_output=job_output,
        seed=seed,
        max_running=max_running,
        max_context=None if max_context is None else parse_length(max_context, "--max-context"),
        dtype=dtype,
        arguments=tuple(arguments or ()),
        bandwidth=BOUND_GBS if bandwidth is None else bandwidth,
        out=out,
        charts=charts,
        force=force,
        dry_run=dry_run,
    )
    with Console(json=json, quiet=quiet, verbose=verbose) as console:
        result = bench_serve(request, console)
    console.result(result.text(), result.payload())
    if failed := result.failed:
        raise EvaluationError(f"{len(failed)} without a figure, first {failed[0]}", where="bench serve")
