"""Options of the model-level tasks of ``kvcq validate``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcq.cli.values import parse_lengths
from kvcq.errors import InputError, shown

Tasks = Annotated[
    str, typer.Option(help="Comma-separated: attention, perplexity, needle, agreement, decode-kl. See the guide.")
]
Semantics = Annotated[
    str, typer.Option(help="What prefill reads exactly: by-query (window rule), served (by chunks), deferred (all).")
]
Chunk = Annotated[int, typer.Option(help="Tokens in one forward of a prefill.", min=1)]
CachedAt = Annotated[int | None, typer.Option(help="With --semantics served: tokens found in the prefix cache.", min=1)]
Cache = Annotated[str, typer.Option(help="packed (true memory), simulate, or auto: packed where pages hold the codes.")]
NewTokens = Annotated[int, typer.Option(help="Greedy tokens that agreement compares.", min=1)]
DecodeSteps = Annotated[int, typer.Option(help="Single-token steps of decode-kl.", min=1)]
NeedleTasks = Annotated[
    str,
    typer.Option(
        help="all, or some of single_1, single_2, single_3, multikey_1, multikey_2, multikey_3, multivalue, multiquery."
    ),
]
NeedleLengths = Annotated[str | None, typer.Option(help="Context lengths of needle, e.g. 4k,8k; default: --contexts.")]
NeedleDepths = Annotated[str, typer.Option(help="Depths of the first needle in percent, taken in turns.")]
NeedleArtifacts = Annotated[
    str | None, typer.Option(help="Artifacts asked for needles beside the reference, by name; default: all.")
]
NeedleItems = Annotated[int, typer.Option(help="Items of each needle subtask at each length.", min=1)]
Haystack = Annotated[
    str,
    typer.Option(help="Text that needles hide in: builtin:noise, builtin:pydoc-topics, or a .txt, .md, .jsonl file."),
]


def task_fields(
    *,
    tasks: str,
    needle_tasks: str,
    needle_lengths: str | None,
    needle_depths: str,
    needle_artifacts: str | None,
    **plain: Any,
) -> dict[str, Any]:
    """Return the fields of `ValidateRequest` that these options set.

    Raises:
        InputError: a list that cannot be read; names the flag. Names are judged later, by the pipeline.
    """
    return plain | {
        "tasks": _names(tasks),
        "needle_tasks": None if needle_tasks == "all" else _names(needle_tasks),
        "needle_lengths": None if needle_lengths is None else parse_lengths(needle_lengths, "--needle-lengths"),
        "needle_artifacts": None if needle_artifacts is None else _names(needle_artifacts),
        "needle_depths": tuple(_percent(item) for item in needle_depths.split(",")),
    }


def lm_eval_line(artifacts: Sequence[Path], model: str) -> str:
    """Return the command that goes on with lm-eval's generative tasks, on the first bundle measured."""
    bundle = next((path for path in artifacts if path.suffix == ".kvcq"), None)
    name = "NAME.kvcq" if bundle is None else str(bundle)
    arguments = shlex.quote(f"pretrained={model},bundle={name}")
    command = f"python -m kvcq.runtime.hf.lm_eval run --model kvcq --model_args {arguments} --tasks gsm8k"
    needs = "kvcq[eval]" if bundle is not None else "kvcq[eval] and a bundle of kvcq pack"
    return f"to go on with lm-eval's generative tasks (needs {needs}): {command}"


def _names(text: str) -> tuple[str, ...]:
    """Return the names of a list once each, in order."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def _percent(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        fix = "write for example 0,50,100"
        raise InputError(f"{shown(text)} is not a number", where="--needle-depths", fix=fix) from None
