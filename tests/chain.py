"""The whole chain on tiny random models, built once a session: text, model folder, stats, fits, report, bundles."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvcq.methods import registry
from kvcq.pipeline.collect import collect
from kvcq.pipeline.fit import fit
from kvcq.pipeline.pack import pack
from kvcq.pipeline.requests import CollectRequest, FitRequest, PackRequest, ValidateRequest
from kvcq.pipeline.validate import ValidateResult, validate
from tests.tiny import save_tiny

WORDS = ("the", "island", "stone", "river", "then", "and", "in", "other", "answer", "under", "sand", "there")
WINDOWS = ("windows.sink=4", "windows.recent=8")
# Small budgets: the law does not depend on how good the codebook is.
CHEAP = {
    "nova": ("iterations=2", "rows=256"),
    # A group of tokens must fit in the recent window.
    "kivi": ("group_tokens=8",),
    "kitty": ("group_tokens=8",),
}
CONTEXTS = (96, 160)


def write_text(path: Path, seed: int, words: int = 900) -> Path:
    """Write seeded prose with numbers in it: about five tiny tokens a word."""
    draw = random.Random(seed)
    path.write_text(" ".join(draw.choice(WORDS) + str(draw.randint(0, 99)) for _ in range(words)))
    return path


@dataclass
class World:
    """One model with everything made from it; `fits` and `bundles` by method."""

    folder: Path
    model: Path
    text: Path
    held_out: Path
    contexts: tuple[int, ...] = CONTEXTS
    fits: dict[str, Path] = field(default_factory=dict)

    @property
    def stats(self) -> Path:
        return self.folder / "stats"

    @property
    def report(self) -> Path:
        return self.folder / "report"

    def collect(self, out: Path, **options: Any) -> Path:
        defaults: dict[str, Any] = {
            "model": str(self.model),
            "data": (str(self.text),),
            "num_tokens": 1024,
            "seq_len": 128,
            "chunk": 64,
            "rows": 256,
            "query_rows": 128,
        }
        collect(CollectRequest(out=out, **defaults | options))
        return out

    def fit(self, out: Path, method: str, *settings: str, **options: Any) -> Path:
        chosen = (*WINDOWS, *CHEAP.get(method, ()), *settings)
        fit(FitRequest(stats=self.stats, out=out, method=method, settings=chosen, **options))
        return out

    def validate(self, out: Path, *artifacts: Path, **options: Any) -> ValidateResult:
        defaults: dict[str, Any] = {
            "model": str(self.model),
            "data": (str(self.held_out),),
            "contexts": self.contexts,
            "queries": 16,
        }
        return validate(ValidateRequest(artifacts=artifacts, out=out, **defaults | options))

    def pack(self, method: str, out: Path, **options: Any) -> Path:
        pack(PackRequest(fit=self.fits[method], report=self.report, out=out, **options))
        return out


def make_world(
    folder: Path, methods: tuple[str, ...], *, model_type: str = "llama", collecting: Any = None, **overrides: Any
) -> World:
    """Run collect, fit and validate of `methods`; `overrides` are configuration fields of the model."""
    torch.set_num_threads(1)
    folder.mkdir()
    world = World(
        folder=folder,
        model=save_tiny(folder / "model", model_type, **overrides),
        text=write_text(folder / "calibration.txt", 1),
        held_out=write_text(folder / "heldout.txt", 2),
    )
    world.collect(world.stats, **(collecting or {}))
    for method in methods:
        world.fits[method] = world.fit(folder / "fits" / method, method)
    world.validate(world.report, *world.fits.values())
    return world


@functools.cache
def llama_world(base: Path) -> World:
    """Return the session's llama with a fit of every method and a bundle of nova."""
    world = make_world(base / "llama", tuple(registry.available()))
    world.pack("nova", world.folder / "nova.kvcq")
    return world


def contents(path: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a folder, or of the one file."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()
    }


def python(*arguments: str, **environment: str) -> list[str] | Any:
    """Run this interpreter in a bare environment and return the finished process with bytes."""
    return subprocess.run(
        [sys.executable, *arguments], env=bare_environment(**environment), capture_output=True, check=False, timeout=120
    )


def bare_environment(**extra: str) -> dict[str, str]:
    """Return an environment without anything that changes colour, encoding or threads, and then `extra`."""
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "SYSTEMROOT", "TMPDIR")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[1])} | extra
