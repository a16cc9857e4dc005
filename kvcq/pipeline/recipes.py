"""From a recipe file and ``key=value`` settings to one resolved `Recipe`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from kvcq.errors import InputError
from kvcq.methods import registry
from kvcq.methods.base import Method
from kvcq.spec.recipe import Recipe

COMMON = ("method", "params", "windows", "skip_layers", "target_context", "seed")


def load_recipe(path: Path) -> dict[str, Any]:
    """Read a YAML recipe: common fields, and the method's parameters under ``params``.

    Raises:
        InputError: unreadable, not YAML, not a mapping, or an unknown field.
    """
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the recipe: {error}", where=path, fix="name a readable YAML file") from None
    except yaml.YAMLError as error:
        raise InputError(f"not YAML: {error}", where=path, fix="see examples/ for recipes") from None
    if not isinstance(value, dict):
        raise InputError("a recipe is a mapping of fields", where=path, fix="see examples/ for recipes")
    for key in value:
        if key not in COMMON:
            raise InputError(f"unknown recipe field {key!r}", where=path, fix=_suggest(str(key), COMMON))
    return value


def apply_settings(recipe: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Apply ``key=value`` settings; a key that is no common field is a parameter of the method.

    Values are YAML scalars; ``skip_layers`` takes a comma-separated list; ``windows.sink`` reaches inside.

    Raises:
        InputError: no ``=``, or a value that is not YAML.
    """
    result = {**recipe, "params": dict(recipe.get("params") or {}), "windows": dict(recipe.get("windows") or {})}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise InputError(f"{setting!r} is not key=value", where="--set", fix="for example --set clip_k=0.96")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise InputError(f"cannot read the value of {setting!r}", where="--set", fix="use a plain value") from None
        if key == "skip_layers":
            result[key] = [int(item) for item in _items(text)]
        elif key.startswith("windows."):
            result["windows"][key.removeprefix("windows.")] = value
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
    method = registry.create(name, dict(fields.get("params") or {}))
    try:
        recipe = Recipe.model_validate({**fields, "method": method.name, "params": dataclasses.asdict(method)})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{field}: {first['msg']}", where=where, fix="correct this recipe field") from None
    return recipe, method


def _items(text: str) -> list[str]:
    items = [item.strip() for item in text.strip("[] ").split(",") if item.strip()]
    if not all(item.isdigit() for item in items):
        raise InputError(f"{text!r} is not a list of layer ids", where="--set skip_layers", fix="for example 0,1,29")
    return items


def _suggest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known fields: {', '.join(known)}"
