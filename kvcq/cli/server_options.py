"""Options of ``kvcq validate --server``, and the run that they ask for."""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcq.errors import InputError

if TYPE_CHECKING:
    from kvcq.cli.console import Console
    from kvcq.pipeline.requests import ServerRequest

Server = Annotated[
    list[str] | None,
    typer.Option(help="Ask this OpenAI-compatible server instead: URL, or NAME=URL to compare several; repeat."),
]
ServedModel = Annotated[
    list[str] | None, typer.Option(help="Model to ask for, MODEL or NAME=MODEL, where a server serves several.")
]
Items = Annotated[list[Path] | None, typer.Option(help="Task file for --server: .jsonl of prompt, answers, metric.")]
Api = Annotated[str, typer.Option(help="With --server: chat, or completions (raw prompts).")]
Samples = Annotated[int, typer.Option(help="With --server: answers to each prompt; seeds count up.", min=1)]
Temperature = Annotated[float, typer.Option(help="With --server: sampling temperature, 0 is greedy.", min=0.0)]
MaxTokens = Annotated[int, typer.Option(help="With --server: most tokens of an answer.", min=1)]
Body = Annotated[str, typer.Option(help="With --server: more fields of each request, as a JSON object.")]
Concurrency = Annotated[int, typer.Option(help="With --server: requests on their way at once.", min=1, max=4096)]
Timeout = Annotated[float, typer.Option(help="With --server: seconds for one attempt.", min=0.1)]
Retries = Annotated[int, typer.Option(help="With --server: attempts after the first.", min=0, max=100)]
KeyFile = Annotated[Path | None, typer.Option(help="With --server: file that holds the API key.")]
AllowCode = Annotated[
    bool,
    typer.Option("--allow-code-execution", help="Run what the model writes, for metric code: limited, but not a jail."),
]
CodeTimeout = Annotated[float, typer.Option(help="With --server: seconds for one run of code.", min=0.1)]
AllowEmpty = Annotated[bool, typer.Option("--allow-empty", help="With --server: an empty answer is wrong, no error.")]
Resume = Annotated[bool, typer.Option("--resume", help="With --server: continue an interrupted run.")]

# What only one of the two ways to validate reads, by parameter.
SERVER_ONLY = (
    *("items", "served_model", "api", "samples", "temperature", "max_tokens", "body", "concurrency", "timeout"),
    *("retries", "api_key_file", "allow_code_execution", "code_timeout", "allow_empty", "resume"),
)
LOCAL_ONLY = (
    *("artifacts", "data", "passages", "queries", "gates", "canary", "device", "dtype", "device_map", "strict"),
    *("semantics", "chunk", "cached_at", "cache", "new_tokens", "decode_steps", "needle_artifacts"),
    *("sweep_axes", "stats", "method", "recipe", "settings", "target_context"),
)
FLAGS = {"artifacts": "FIT", "canary": "--no-canary", "sweep_axes": "--sweep", "settings": "--set"}

_NAMED = re.compile(r"^([A-Za-z0-9][A-Za-z0-9 ._-]{0,63})=(.+)$", re.DOTALL)


def server_request(
    servers: Sequence[str], served_models: Sequence[str], items: Sequence[Path], body: str, **options: Any
) -> ServerRequest:
    """Read the options that need reading and return the request.

    Raises:
        InputError: a server without a URL, no task file, or a body that is no JSON object.
    """
    from kvcq.pipeline.requests import ServerRequest

    named = [split_name(text) for text in servers]
    names = {name for name, _ in named}
    models = [
        (name, model) if name in names else ("", text) for text in served_models for name, model in [split_name(text)]
    ]
    return ServerRequest(
        servers=tuple(named), items=tuple(items), served_models=tuple(models), body=parse_body(body), **options
    )


def split_name(text: str) -> tuple[str, str]:
    """Read ``NAME=VALUE``; the name is empty where there is none. A URL may hold a ``=`` of its own."""
    match = _NAMED.match(text)
    return (match[1], match[2]) if match else ("", text)


def parse_body(text: str) -> dict[str, Any]:
    """Read the fields of ``--body``.

    Raises:
        InputError: not a JSON object.
    """
    try:
        plain = json_module.loads(text or "{}")
    except (ValueError, RecursionError):
        plain = None
    if not isinstance(plain, dict):
        raise InputError("not a JSON object", where="--body", fix="""write for example '{"top_p": 0.95}'""")
    return plain


def refuse_mixed(context: typer.Context, servers: bool) -> None:
    """Refuse options of the other way to validate: none of them would do anything.

    Args:
        context: Tells what the user gave.
        servers: Servers are asked.

    Raises:
        InputError: names the first one.
    """
    for name in LOCAL_ONLY if servers else SERVER_ONLY:
        source = context.get_parameter_source(name)
        if source is None or source.name == "DEFAULT":
            continue
        flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
        what = f"{flag} and --server exclude each other" if servers else f"{flag} needs --server"
        raise InputError(what, where=flag, fix="see kvcq validate --help")


def needle_options(tasks: Sequence[str], model: str | None) -> bool:
    """Return whether needles are asked for.

    Raises:
        InputError: a task that needs more than answers, or no tokenizer to make needles with.
    """
    # Attention is what validate measures when no task is named.
    wanted = [task for task in tasks if task != "attention"]
    if other := [task for task in wanted if task != "needle"]:
        what = f"{other[0]} is not measured on a server"
        raise InputError(what, where="--tasks", fix="use needle, or --items")
    if wanted and not model:
        raise InputError("needles are made with a tokenizer", where="--model", fix="name the model that is served")
    return bool(wanted)


def run_servers(request: ServerRequest, console: Console) -> None:
    """Ask the servers and print the scores."""
    from kvcq.pipeline.validate_server import validate_server

    with console:
        result = validate_server(request, console)
    console.result(result.text(), result.payload())
