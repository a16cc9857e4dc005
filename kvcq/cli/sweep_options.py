"""Options of ``kvcq validate --sweep``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcq.cli.values import parse_length
from kvcq.errors import InputError

if TYPE_CHECKING:
    from kvcq.pipeline.requests import SweepRequest, ValidateRequest

SweepAxes = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        help="key=v1,v2: fit and measure every value of a recipe field or parameter; windows=SINK/RECENT,... and "
        "clip=... too. Repeat for a grid.",
    ),
]
Stats = Annotated[Path | None, typer.Option(help="With --sweep: the statistics that every point is fitted to.")]
SweptMethod = Annotated[str | None, typer.Option("--method", help="With --sweep: the method.")]
SweptRecipe = Annotated[Path | None, typer.Option("--recipe", help="With --sweep: YAML recipe that all points share.")]
SweptSettings = Annotated[list[str] | None, typer.Option("--set", help="With --sweep: key=value of all points.")]
SweptTarget = Annotated[str | None, typer.Option("--target-context", help="With --sweep: as in kvcq fit.")]


def split_axes(arguments: Sequence[Path], axes: Sequence[str]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Return artifacts and axes: after ``--sweep`` more axes may stand alone, ``--sweep windows=0/0 clip=0.9,1.0``."""
    more = [path for path in arguments if axes and "=" in str(path) and not path.exists()]
    return tuple(path for path in arguments if path not in more), (*axes, *map(str, more))


def refuse_stray(axes: Sequence[str], given: Mapping[str, object]) -> None:
    """Refuse an option of sweeps without ``--sweep``, and a sweep without statistics.

    Raises:
        InputError: names the option.
    """
    if axes and not given["--stats"]:
        raise InputError("a sweep fits statistics", where="--sweep", fix="add --stats, the folder of kvcq collect")
    extra = [flag for flag, value in given.items() if value]
    if extra and not axes:
        fix = "add --sweep, or fit first with kvcq fit"
        raise InputError(f"{extra[0]} is for sweeps", where="validate", fix=fix)


def sweep_request(
    request: ValidateRequest,
    axes: tuple[str, ...],
    *,
    stats: Path,
    method: str | None,
    recipe: Path | None,
    settings: Sequence[str],
    target_context: str | None,
) -> SweepRequest:
    """Return the request of a sweep over the same artifacts, model, text and tasks.

    Raises:
        InputError: a target context that is no number of tokens.
    """
    from kvcq.pipeline.requests import SweepRequest

    return SweepRequest(
        **{field.name: getattr(request, field.name) for field in fields(request)},
        stats=stats,
        sweep=axes,
        method=method,
        recipe=recipe,
        settings=tuple(settings),
        target_context=None if target_context is None else parse_length(target_context, "--target-context"),
    )
