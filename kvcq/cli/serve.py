"""kvcq serve."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcq.cli.console import Console
from kvcq.cli.options import ChatTemplate, Debug, Device, DeviceMap, Dtype, Json, Quiet, RemoteCode, Revision, Verbose
from kvcq.cli.values import parse_length, parse_size

if TYPE_CHECKING:
    from kvcq.pipeline.serve import Ready

ENGINES = ("hf",)


def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle, NAME.kvcq.")],
    model: Annotated[str, typer.Option(help="The model that it was fitted for.")],
    engine: Annotated[str, typer.Option(help="hf: the embedded engine, for laptops and CI.")] = "hf",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port, 0 for a free one.", min=0, max=65535)] = 8000,
    served_name: Annotated[str | None, typer.Option(help="Name of the model in requests.")] = None,
    memory: Annotated[str, typer.Option(help="Memory of the cache, e.g. 512M or 4G.")] = "1G",
    max_context: Annotated[str | None, typer.Option(help="Most tokens of a request, e.g. 8k.")] = None,
    max_running: Annotated[int, typer.Option(help="Requests that take turns.", min=1)] = 8,
    max_queue: Annotated[int, typer.Option(help="Requests that wait beyond those.", min=0)] = 64,
    chunk: Annotated[int, typer.Option(help="Prompt tokens in one forward.", min=1)] = 512,
    timeout: Annotated[float, typer.Option(help="Seconds for a request, waiting included.", min=0.001)] = 600.0,
    grace: Annotated[float, typer.Option(help="Seconds for running requests after a signal.", min=0, max=86400)] = 10.0,
    threads: Annotated[int | None, typer.Option(help="Processor threads.", min=1)] = None,
    chat_template: ChatTemplate = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    revision: Revision = None,
    trust_remote_code: RemoteCode = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse other weights or another revision.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Serve a model with its 2-bit cache to OpenAI clients, once the bundle has been proven to be on.

    Example: kvcq serve smollm2-nova.kvcq --model smollm2-135m --port 8000
    """
    from kvcq.cli.options import choice
    from kvcq.errors import UnsupportedError
    from kvcq.pipeline.requests import ServeRequest
    from kvcq.pipeline.serve import serve

    if engine == "sglang":
        raise UnsupportedError("the SGLang engine is not in this version", where="--engine", fix="use --engine hf")
    choice(engine, ENGINES, "--engine")
    request = ServeRequest(
        bundle=bundle,
        model=model,
        host=host,
        port=port,
        served_name=served_name,
        memory=parse_size(memory, "--memory"),
        max_context=None if max_context is None else parse_length(max_context, "--max-context"),
        max_running=max_running,
        max_queue=max_queue,
        chunk=chunk,
        timeout=timeout,
        grace=grace,
        threads=threads,
        chat_template=chat_template,
        device=device,
        dtype=dtype,
        device_map=device_map,
        revision=revision,
        trust_remote_code=trust_remote_code,
        strict=strict,
    )
    with Console(json=json, quiet=quiet, verbose=verbose) as console:

        def ready(server: Ready) -> None:
            console.stage("serving")
            console.settle()  # a server has no progress to show
            console.result(server.text(), server.payload())

        serve(request, console, ready)
