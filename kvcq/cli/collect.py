"""kvcq collect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcq.cli.console import Console
from kvcq.cli.options import (
    ChatTemplate,
    Data,
    Debug,
    Device,
    DeviceMap,
    DryRun,
    Dtype,
    Force,
    Json,
    Quiet,
    RemoteCode,
    Revision,
    Template,
    TextColumn,
    Verbose,
    choice,
)
from kvcq.cli.values import parse_length, parse_shard


def command(
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, or smollm2-135m.")],
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("stats"),
    num_tokens: Annotated[str, typer.Option(help="Tokens wanted, e.g. 64k.")] = "64k",
    seq_len: Annotated[str, typer.Option(help="Tokens in a sequence; statistics hold below it.")] = "4k",
    chunk: Annotated[str, typer.Option(help="Tokens in one forward of the chunked prefill.")] = "4k",
    packing: Annotated[str, typer.Option(help="on, isolate (texts share a sequence unseen) or off.")] = "on",
    template: Template = "auto",
    chat_template: ChatTemplate = None,
    text_column: TextColumn = None,
    rows: Annotated[int, typer.Option(help="Sampled K and V rows per layer and KV head.", min=256)] = 8192,
    seed: Annotated[int, typer.Option(help="Seed of the row sample.", min=0)] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    revision: Revision = None,
    trust_remote_code: RemoteCode = False,
    shard: Annotated[
        str | None, typer.Option(help="I/N: run every N-th sequence from the I-th (0 to N-1) on; kvcq merge joins.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue after an interruption, from the checkpoint.")
    ] = False,
    checkpoint_every: Annotated[
        int, typer.Option(help="Seconds between checkpoints; 0: one after each sequence.", min=0)
    ] = 300,
    force: Force = False,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Stream text through a model and write its attention statistics.

    The statistics hold token digests and raw key and value rows: they are as private as the text.

    Example: kvcq collect smollm2-135m --data builtin:pydoc-topics --out stats/
    After an interruption repeat the command with --resume. On two machines: --shard 0/2, --shard 1/2, then kvcq merge.
    """
    from kvcq.pipeline.collect import collect
    from kvcq.pipeline.requests import CollectRequest

    request = CollectRequest(
        model=model,
        data=tuple(data),
        out=out,
        num_tokens=parse_length(num_tokens, "--num-tokens"),
        seq_len=parse_length(seq_len, "--seq-len"),
        chunk=parse_length(chunk, "--chunk"),
        packing=choice(packing, ("on", "isolate", "off"), "--packing"),  # type: ignore[arg-type]
        template=choice(template, ("auto", "chat", "raw"), "--template"),  # type: ignore[arg-type]
        chat_template=chat_template,
        text_column=text_column,
        rows=rows,
        query_rows=min(rows, 1024),
        seed=seed,
        device=device,
        dtype=dtype,
        device_map=device_map,
        revision=revision,
        trust_remote_code=trust_remote_code,
        shard=parse_shard(shard),
        resume=resume,
        checkpoint_every=checkpoint_every,
        force=force,
        dry_run=dry_run,
    )
    with Console(json=json, quiet=quiet, verbose=verbose) as console:
        result = collect(request, console)
    console.result(result.text(), result.payload())
