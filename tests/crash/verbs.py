"""The verbs that write, as command lines on the tiny model, run in a forked child that may die."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from kvcq.artifacts.verify import verify
from kvcq.cli import main
from kvcq.errors import KvcqError
from kvcq.models.load import load_model
from kvcq.pipeline import collect as collect_module
from kvcq.pipeline import validate as validate_module
from tests.chain import World, contents
from tests.crash.faults import Faults

# The seconds of a report are not sealed, and differ between any two runs.
UNSEALED = "run.json"
SMALL = ("--set", "windows.sink=4", "--set", "windows.recent=8")


@dataclass(frozen=True)
class Ended:
    """How a child ended: exit code (negative: signal), its lines on stderr, write points it passed (-1: it died)."""

    code: int
    lines: list[str]
    points: int = -1

    @property
    def errors(self) -> list[str]:
        return [line for line in self.lines if line.startswith("error: ")]


@dataclass(frozen=True)
class Bench:
    """Folder to write in, a log beside it, and the world to read from."""

    world: World
    folder: Path
    log: Path

    def words(self, verb: str, out: Path) -> list[str]:
        """Return the command line of a verb that writes `out`."""
        world = self.world
        text, held_out, stats = ("--data", world.text), ("--data", world.held_out), world.stats
        few = ("--seq-len", 64, "--num-tokens", 384, "--rows", 256, "--shard", "0/2", "--checkpoint-every", 0)
        packed = (world.fits["nova"], "--report", world.report)
        short = ("--contexts", 96, "--queries", 4)
        lines = {
            "collect": ("collect", world.model, *text, *few),
            "merge": ("merge", world.folder / "shard0", world.folder / "shard1"),
            "fit": ("fit", stats, "--method", "oscar", *SMALL),
            "validate": ("validate", world.fits["oscar"], "--model", world.model, *held_out, *short),
            "pack": ("pack", *packed),
            "archive": ("pack", *packed, "--archive"),
        }
        return [str(word) for word in (*lines[verb], "--out", out)]

    def out(self, verb: str) -> Path:
        return self.folder / ("it.kvcq" if verb in ("pack", "archive") else "it")

    def run(self, words: list[str], faults: Faults | None = None, kill_after: float | None = None) -> Ended:
        """Run a command line in a child; with `kill_after` it gets SIGKILL after so many seconds."""
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            self._child(words, faults)
        if kill_after is not None:
            while time.monotonic() - started < kill_after and os.waitpid(child, os.WNOHANG) == (0, 0):
                time.sleep(0.002)
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                return Ended(0, [])
        status = os.waitpid(child, 0)[1]
        lines = self.log.read_text().splitlines()
        points = int(lines.pop().removeprefix("points ")) if lines and lines[-1].startswith("points ") else -1
        return Ended(os.waitstatus_to_exitcode(status), lines, points)

    def _child(self, words: list[str], faults: Faults | None) -> None:
        code = 99
        # Collecting the parent's objects would copy its pages.
        gc.freeze()
        try:
            with self.log.open("w") as log, Path(os.devnull).open("w") as nothing:
                sys.stdout, sys.stderr = nothing, log
                if faults is not None:
                    faults.install()
                code = main.execute(words)
                print(f"points {faults.count if faults else 0}", file=log, flush=True)
        finally:
            os._exit(code)

    def clear(self) -> None:
        shutil.rmtree(self.folder)
        self.folder.mkdir()


def preload(world: World, patch: Callable[[Any, str, Any], None]) -> None:
    """Let collect and validate find the model in memory, and commands their options: loading is not what dies here."""
    patch(main, "app", typer.main.get_command(main.app))
    loaded = load_model(str(world.model))
    geometry: dict[str, Any] = {}
    for module in (collect_module, validate_module):
        check = module.self_check

        def once(source: Any, tokens: Any, *, warn: Any, check: Any = check) -> Any:
            if "it" not in geometry:
                geometry["it"] = check(source, tokens, warn=warn)
            return geometry["it"]

        patch(module, "open_model", lambda *_, **__: loaded)
        patch(module, "self_check", once)
    tokens = loaded.tokenizer("the island then the stone", return_tensors="pt").input_ids[0]
    collect_module.self_check(loaded, tokens, warn=lambda _: None)


def sealed(path: Path) -> dict[str, str]:
    """Return the hashes of an artifact's files, without the one that holds times."""
    return {name: value for name, value in contents(path).items() if name != UNSEALED}


def refused(path: Path) -> bool:
    """Return True when no step would take this path for an artifact."""
    try:
        verify(path)
    except KvcqError:
        return True
    return False


def points_of(bench: Bench, verb: str, *more: str, removals: bool) -> int:
    """Return how many write points a run of the verb has, from nothing."""
    out = bench.out(verb)
    ended = bench.run([*bench.words(verb, out), *more], Faults(bench.folder, -1, lambda: None, removals=removals))
    assert ended.code == 0 and ended.points > 8, ended
    return ended.points


def moments(seed: int, longest: float) -> Callable[[], float]:
    """Return a source of random delays below `longest` seconds."""
    draw = random.Random(seed)
    return lambda: draw.uniform(0.0, longest)
