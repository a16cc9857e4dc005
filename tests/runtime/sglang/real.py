"""Real classes of a release, cut out of its sources and run alone."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from tests.runtime.sglang.wheels import Sources


def definitions(
    sources: Sources, module: str, names: tuple[str, ...], scope: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return some classes of a module; `scope` holds what they call."""
    scope = {"__name__": __name__, "dataclass": dataclass} | (scope or {})
    body = [sources.find(f"{module}.{name}") for name in names]
    future = ast.parse("from __future__ import annotations").body
    tree = ast.fix_missing_locations(ast.Module(body=[*future, *body], type_ignores=[]))
    exec(compile(tree, f"{module} of {sources.version}", "exec"), scope)  # noqa: S102
    return {name: scope[name] for name in names}
