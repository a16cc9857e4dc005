"""Fit several recipes to one collection and describe each fit, all in Python.

Usage: python examples/compare_recipes.py STATS RECIPE.yaml [RECIPE.yaml ...]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import kvcq


def main(stats: Path, recipes: list[Path]) -> None:
    """Fit each recipe into a temporary folder and describe the result."""
    with tempfile.TemporaryDirectory() as folder:
        for recipe in recipes:
            out = Path(folder) / recipe.stem
            kvcq.fit(kvcq.FitRequest(stats=stats, recipe=recipe, out=out))
            print(f"== {recipe.name}")
            print(kvcq.inspect(out).text())


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
