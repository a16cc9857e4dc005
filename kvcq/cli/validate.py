"""kvcq validate."""

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
from kvcq.cli.values import parse_lengths


def command(
    artifacts: Annotated[list[Path], typer.Argument(help="Fit folders or bundles, measured side by side.")],
    model: Annotated[str, typer.Option(help="The model they were fitted for.")],
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("report"),
    contexts: Annotated[str, typer.Option(help="Context lengths, e.g. 2k,8k.")] = "2k",
    passages: Annotated[int, typer.Option(help="Held-out sequences of the longest context.", min=1)] = 1,
    queries: Annotated[int, typer.Option(help="Query positions per context.", min=1)] = 64,
    gates: Annotated[Path | None, typer.Option(help="YAML file of gates; a failed gate exits with 3.")] = None,
    canary: Annotated[bool, typer.Option(help="Record the activation canary, which pack needs.")] = True,
    template: Template = "auto",
    chat_template: ChatTemplate = None,
    text_column: TextColumn = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    revision: Revision = None,
    trust_remote_code: RemoteCode = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse other weights or another revision.")] = False,
    force: Force = False,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Measure artifacts on held-out text and write report.json and report.html.

    Example: kvcq validate fit/ --model smollm2-135m --data builtin:stdlib --contexts 2k,4k --out report/
    """
    from kvcq.errors import GateFailed
    from kvcq.pipeline.requests import ValidateRequest
    from kvcq.pipeline.validate import validate

    request = ValidateRequest(
        artifacts=tuple(artifacts),
        model=model,
        data=tuple(data),
        out=out,
        contexts=parse_lengths(contexts, "--contexts"),
        passages=passages,
        queries=queries,
        gates=gates,
        canary=None if canary else (),
        template=choice(template, ("auto", "chat", "raw"), "--template"),  # type: ignore[arg-type]
        chat_template=chat_template,
        text_column=text_column,
        device=device,
        dtype=dtype,
        device_map=device_map,
        revision=revision,
        trust_remote_code=trust_remote_code,
        strict=strict,
        force=force,
        dry_run=dry_run,
    )
    with Console(json=json, quiet=quiet, verbose=verbose) as console:
        result = validate(request, console)
    if result.path is None:
        console.result("dry run: artifacts, model and text fit together; nothing written", result.payload())
        return
    console.report(result.report, f"report: {result.path / 'report.html'}", result.payload())
    if result.failed_gates:
        raise GateFailed(
            f"{len(result.failed_gates)} of {len(result.report.gates)} gates failed",
            where=result.failed_gates[0],
            fix="see the report, or choose another method or gate",
        )
