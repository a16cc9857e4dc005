"""kvcq validate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvcq.cli.console import Console
from kvcq.cli.options import (
    ChatTemplate,
    Debug,
    Device,
    DeviceMap,
    DryRun,
    Dtype,
    Force,
    Json,
    OptionalData,
    Quiet,
    RemoteCode,
    Revision,
    Template,
    TextColumn,
    Verbose,
    choice,
)
from kvcq.cli.server_options import (
    AllowCode,
    AllowEmpty,
    Api,
    Body,
    CodeTimeout,
    Concurrency,
    Items,
    KeyFile,
    MaxTokens,
    Resume,
    Retries,
    Samples,
    ServedModel,
    Server,
    Temperature,
    Timeout,
    needle_options,
    refuse_mixed,
    run_servers,
    server_request,
)
from kvcq.cli.sweep_options import (
    Stats,
    SweepAxes,
    SweptMethod,
    SweptRecipe,
    SweptSettings,
    SweptTarget,
    refuse_stray,
    split_axes,
    sweep_request,
)
from kvcq.cli.task_options import (
    Cache,
    CachedAt,
    Chunk,
    DecodeSteps,
    Haystack,
    NeedleArtifacts,
    NeedleDepths,
    NeedleItems,
    NeedleLengths,
    NeedleTasks,
    NewTokens,
    Semantics,
    Tasks,
    lm_eval_line,
    task_fields,
)
from kvcq.cli.values import parse_lengths
from kvcq.errors import InputError

MAX_SEED = (1 << 53) - 1


def command(
    context: typer.Context,
    artifacts: Annotated[
        list[Path] | None, typer.Argument(help="Fit folders or bundles, measured side by side.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model they were fitted for.")] = None,
    data: OptionalData = None,
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
    tasks: Tasks = "attention",
    semantics: Semantics = "by-query",
    chunk: Chunk = 512,
    cached_at: CachedAt = None,
    cache: Cache = "auto",
    new_tokens: NewTokens = 128,
    decode_steps: DecodeSteps = 32,
    needle_tasks: NeedleTasks = "all",
    needle_lengths: NeedleLengths = None,
    needle_depths: NeedleDepths = "0,25,50,75,100",
    needle_items: NeedleItems = 20,
    needle_artifacts: NeedleArtifacts = None,
    haystack: Haystack = "builtin:noise",
    seed: Annotated[
        int, typer.Option(help="Seed of needle questions, of sampling and of bootstraps.", min=0, max=MAX_SEED)
    ] = 0,
    sweep_axes: SweepAxes = None,
    stats: Stats = None,
    method: SweptMethod = None,
    recipe: SweptRecipe = None,
    settings: SweptSettings = None,
    target_context: SweptTarget = None,
    server: Server = None,
    served_model: ServedModel = None,
    items: Items = None,
    api: Api = "chat",
    samples: Samples = 1,
    temperature: Temperature = 0.0,
    max_tokens: MaxTokens = 1024,
    body: Body = "",
    concurrency: Concurrency = 8,
    timeout: Timeout = 600.0,
    retries: Retries = 4,
    api_key_file: KeyFile = None,
    allow_code_execution: AllowCode = False,
    code_timeout: CodeTimeout = 10.0,
    allow_empty: AllowEmpty = False,
    resume: Resume = False,
    force: Force = False,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Measure artifacts on held-out text and write report.json and report.html.

    Tasks other than attention run the model on the quantized cache: prefill in chunks and decoding, one artifact
    beside the other and beside a BF16 cache.

    With --sweep, fit a grid of settings to the same statistics and measure all points in one report.

    With --server, ask OpenAI-compatible servers the questions of task files and write scores.json and scores.html.

    Example: kvcq validate fit/ --model smollm2-135m --data builtin:stdlib --contexts 2k,4k --out report/

    Example: kvcq validate fit/ --model smollm2-135m --data builtin:stdlib --tasks perplexity,needle --needle-items 5

    Example: kvcq validate --sweep windows=0/0,64/256 --stats stats/ --method nova --model MODEL --data heldout.txt

    Example: kvcq validate --server bf16=http://HOST:30000 --server nova=http://HOST:30001 --items gpqa.jsonl

    Example: kvcq validate --server http://HOST:30000 --api completions --tasks needle --model MODEL
    """
    from kvcq.pipeline.requests import ValidateRequest

    console = Console(json=json, quiet=quiet, verbose=verbose)
    chosen = task_fields(
        tasks=tasks,
        needle_tasks=needle_tasks,
        needle_lengths=needle_lengths,
        needle_depths=needle_depths,
        semantics=semantics,
        chunk=chunk,
        cached_at=cached_at,
        cache=cache,
        new_tokens=new_tokens,
        decode_steps=decode_steps,
        needle_items=needle_items,
        needle_artifacts=needle_artifacts,
        haystack=haystack,
    )

    def measured(artifacts: Sequence[Path], model: str, data: Sequence[str]) -> ValidateRequest:
        return ValidateRequest(
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
            seed=seed,
            **chosen,
        )

    refuse_mixed(context, bool(server))
    if server:
        needles = needle_options(chosen["tasks"], model)
        request = server_request(
            server,
            served_model or (),
            items or (),
            body,
            needles=measured((), model, ()) if needles and model else None,
            out=out,
            api=choice(api, ("chat", "completions"), "--api"),
            samples=samples,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
            concurrency=concurrency,
            timeout=timeout,
            retries=retries,
            api_key_file=api_key_file,
            allow_code_execution=allow_code_execution,
            code_timeout=code_timeout,
            allow_empty=allow_empty,
            resume=resume,
            force=force,
            dry_run=dry_run,
        )
        run_servers(request, console)
        return
    found, axes = split_axes(artifacts or (), sweep_axes or ())
    refuse_stray(
        axes,
        {
            "--stats": stats,
            "--method": method,
            "--recipe": recipe,
            "--set": settings,
            "--target-context": target_context,
        },
    )
    if not (found or axes) or not model or not data:
        missing = "a fit" if not (found or axes) else "--data" if model else "--model"
        fix = "give artifacts, --model and --data, or --server"
        raise InputError(f"{missing} is missing", where="validate", fix=fix)
    from kvcq.errors import GateFailed
    from kvcq.pipeline.sweep import sweep
    from kvcq.pipeline.validate import ValidateResult, validate

    own_request = measured(found, model, data)
    swept = None
    if axes and stats is not None:
        swept = sweep_request(
            own_request,
            axes,
            stats=stats,
            method=method,
            recipe=recipe,
            settings=settings or (),
            target_context=target_context,
        )
    with console:
        result = validate(own_request, console) if swept is None else sweep(swept, console)
    if not isinstance(result, ValidateResult):
        console.result(result.text(), result.payload())
        return
    if result.path is None:
        console.result("dry run: artifacts, model and text fit together; nothing written", result.payload())
        return
    console.report(result.report, f"report: {result.path / 'report.html'}", result.payload())
    console.note(lm_eval_line(found, model))
    if result.failed_gates:
        raise GateFailed(
            f"{len(result.failed_gates)} of {len(result.report.gates)} gates failed",
            where=result.failed_gates[0],
            fix="see the report, or choose another method or gate",
        )
