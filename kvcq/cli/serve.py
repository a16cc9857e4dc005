"""kvcq serve."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcq.cli.console import Console
from kvcq.cli.options import ChatTemplate, Debug, Device, DeviceMap, Dtype, Json, Quiet, RemoteCode, Revision, Verbose
from kvcq.cli.values import parse_length, parse_size

if TYPE_CHECKING:
    from kvcq.pipeline.ready import Ready

ENGINES = ("hf", "sglang")
RUNNING = {"hf": 8, "sglang": 64}
# Options of one engine only, and what takes their place with the other.
OF_HF = {
    "memory": "--mem-fraction-static, after --",
    "max_queue": "--max-queued-requests, after --",
    "chunk": "--chunked-prefill-size, after --",
    "device": "CUDA_VISIBLE_DEVICES",
    "device_map": "--tp-size, after --",
    "timeout": None,
    "threads": None,
}
OF_SGLANG = ("trace", "sink_entries", "arguments")


def command(
    context: typer.Context,
    bundle: Annotated[Path, typer.Argument(help="Bundle, NAME.kvcq.")],
    model: Annotated[str, typer.Option(help="The model that it was fitted for.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Flags for SGLang, after --.")] = None,
    engine: Annotated[
        str, typer.Option(help="hf: the embedded engine, for laptops and CI. sglang: an installed SGLang, on a GPU.")
    ] = "hf",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port, 0 for a free one.", min=0, max=65535)] = 8000,
    served_name: Annotated[str | None, typer.Option(help="Name of the model in requests.")] = None,
    memory: Annotated[str, typer.Option(help="Memory of the cache, e.g. 512M or 4G.")] = "1G",
    max_context: Annotated[str | None, typer.Option(help="Most tokens of a request, e.g. 8k.")] = None,
    max_running: Annotated[
        int | None, typer.Option(help="Requests at once: 8 (hf) or 64 (sglang) where not given.", min=1)
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that wait beyond those.", min=0)] = 64,
    chunk: Annotated[int, typer.Option(help="Prompt tokens in one forward.", min=1)] = 512,
    timeout: Annotated[float, typer.Option(help="Seconds for a request, waiting included.", min=0.001)] = 600.0,
    grace: Annotated[float, typer.Option(help="Seconds for running requests after a signal.", min=0, max=86400)] = 10.0,
    threads: Annotated[int | None, typer.Option(help="Processor threads.", min=1)] = None,
    trace: Annotated[
        Path | None, typer.Option(help="sglang: file that receives a line for each request, with its boundaries.")
    ] = None,
    sink_entries: Annotated[
        int | None,
        typer.Option(help="sglang: beginnings of prompts that can be reused, --max-running where not given.", min=1),
    ] = None,
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

    choice(engine, ENGINES, "--engine")
    _check_engine(context, engine)
    longest = None if max_context is None else parse_length(max_context, "--max-context")
    running = RUNNING[engine] if max_running is None else max_running
    with Console(json=json, quiet=quiet, verbose=verbose) as console:

        def ready(server: Ready) -> None:
            console.stage("serving")
            console.settle()  # a server has no progress to show
            console.result(server.text(), server.payload())

        if engine == "sglang":
            from kvcq.pipeline.serve_sglang import serve_sglang
            from kvcq.pipeline.sglang.request import SglangRequest

            code = serve_sglang(
                SglangRequest(
                    bundle=bundle,
                    model=model,
                    revision=revision,
                    dtype=dtype,
                    trust_remote_code=trust_remote_code,
                    host=host,
                    port=port,
                    served_name=served_name,
                    max_context=longest,
                    max_running=running,
                    sink_entries=sink_entries,
                    chat_template=chat_template,
                    trace=trace,
                    arguments=tuple(arguments or ()),
                    grace=grace,
                    strict=strict,
                ),
                console,
                ready,
            )
            raise typer.Exit(code)

        from kvcq.pipeline.requests import ServeRequest
        from kvcq.pipeline.serve import serve

        serve(
            ServeRequest(
                bundle=bundle,
                model=model,
                host=host,
                port=port,
                served_name=served_name,
                memory=parse_size(memory, "--memory"),
                max_context=longest,
                max_running=running,
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
            ),
            console,
            ready,
        )


def _check_engine(context: typer.Context, engine: str) -> None:
    """Refuse options that the chosen engine would ignore.

    Raises:
        InputError: the option, and what takes its place.
    """
    from kvcq.errors import InputError

    given = {
        name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    for name in OF_SGLANG if engine == "hf" else OF_HF:
        if name in given:
            flag = "flags after --" if name == "arguments" else "--" + name.replace("_", "-")
            instead = OF_HF.get(name)
            raise InputError(
                f"{flag} {'are' if name == 'arguments' else 'is'} not for --engine {engine}",
                where=flag,
                fix=f"use {instead}" if instead else "leave it out, or choose the other engine",
            )
