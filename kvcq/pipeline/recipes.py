"""From a recipe file and ``key=value`` settings to one resolved `Recipe`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvcq.errors import SHOWN, InputError, shown
from kvcq.methods import registry
from kvcq.methods.base import Method
from kvcq.spec.plain_yaml import load_yaml, read_yaml
from kvcq.spec.plan import Windows
from kvcq.spec.recipe import Recipe

COMMON = tuple(Recipe.model_fields)
WINDOWS = tuple(Windows.model_fields)
MAPPINGS = ("params", "windows")


def load_recipe(path: Path) -> dict[str, Any]:
    """Read a YAML recipe: common fields, and the method's parameters under ``params``.

    Raises:
        InputError: unreadable, not YAML, not a mapping, or an unknown field.
    """
    try:
        value = read_yaml(path)
    except OSError as error:
        raise InputError(
            f"cannot read the recipe: {error.strerror}", where=path, fix="name a readable YAML file"
        ) from None
    except ValueError as error:
        raise InputError(f"not YAML: {error}", where=path, fix="see examples/ for recipes") from None
    if not isinstance(value, dict):
        raise InputError("a recipe is a mapping of fields", where=path, fix="see examples/ for recipes")
    _refuse_unknown(value, COMMON, "recipe field", path)
    for key in MAPPINGS:
        if not isinstance(value.get(key) or {}, dict):
            raise InputError(f"{key} is not a mapping", where=path, fix=f"write for example {key}: {{name: value}}")
    _refuse_unknown(value.get("windows") or {}, WINDOWS, "windows field", path)
    return value


def apply_settings(recipe: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Apply ``key=value`` settings; a key that is no common field is a parameter of the method.

    Values are YAML scalars; ``skip_layers`` takes a comma-separated list; ``windows.sink`` reaches inside.

    Raises:
        InputError: no ``=``, or a value that is not YAML.
    """
    result = {**recipe, "params": dict(recipe.get("params") or {}), "windows": dict(recipe.get("windows") or {})}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise InputError(f"{shown(setting)} is not key=value", where="--set", fix="for example --set clip_k=0.96")
        if key in MAPPINGS:
            fix = "--set windows.sink=N and --set windows.recent=N" if key == "windows" else "--set NAME=VALUE"
            raise InputError(f"{key} cannot be set as a whole", where="--set", fix=fix)
        try:
            value = load_yaml(text)
        except ValueError:
            raise InputError(
                f"cannot read the value of {shown(setting)}", where="--set", fix="use a plain value"
            ) from None
        if key == "skip_layers":
            result[key] = _layer_ids(text)
        elif key.startswith("windows."):
            name = key.removeprefix("windows.")
            _refuse_unknown((name,), WINDOWS, "windows field", "--set")
            result["windows"][name] = value
        elif key in COMMON:
            result[key] = value
        else:
            result["params"][key] = value
    return result


def resolve(fields: dict[str, Any], where: str | Path) -> tuple[Recipe, Method]:
    """Build the method and the recipe with every parameter filled in.

    Raises:
        InputError: no method, an unknown method or parameter, or a value out of range.
    """
    name = fields.get("method")
    if not isinstance(name, str):
        known = ", ".join(registry.available())
        raise InputError("no method given", where=where, fix=f"--method one of: {known}")
    method = registry.create(name, fields.get("params"))
    try:
        recipe = Recipe.model_validate({**fields, "method": method.name, "params": dataclasses.asdict(method)})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])[:SHOWN]
        raise InputError(f"{field}: {first['msg']}", where=where, fix="correct this recipe field") from None
    return recipe, method


def _layer_ids(text: str) -> list[int]:
    items = [item.strip() for item in text.strip("[] ").split(",") if item.strip()]
    if not all(item.isascii() and item.isdigit() for item in items):
        raise InputError(
            f"{shown(text)} is not a list of layer ids", where="--set skip_layers", fix="for example 0,1,29"
        )
    return [int(item) for item in items]


def _refuse_unknown(names: Iterable[Any], known: Sequence[str], kind: str, where: str | Path) -> None:
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(str(name)[:SHOWN], known, n=1)
            fix = f"did you mean {close[0]!r}?" if close else f"known fields: {', '.join(known)}"
            raise InputError(f"unknown {kind} {shown(name)}", where=where, fix=fix)
