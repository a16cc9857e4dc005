"""Scripts beside the package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def load_benchmark(patch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """Return a script of ``benchmarks/`` as a module that finds those beside it, until `patch` is undone."""
    patch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Data classes look their module up.
    patch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module
