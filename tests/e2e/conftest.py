"""One quickstart on the real model for all end-to-end tests."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.chain import bare_environment

# Half of the text that quickstart calibrates on and a quarter of the queries that it compares: its methods are further
# apart than that moves them.
LESS = """
import functools

from kvcq.cli.main import run
from kvcq.pipeline import quickstart

quickstart.TOKENS //= 2
quickstart.ValidateRequest = functools.partial(quickstart.ValidateRequest, queries=16)
run()
"""


@dataclass(frozen=True)
class Quickstart:
    """The finished process."""

    out: Path
    answer: dict[str, Any]
    progress: list[str]


@pytest.fixture(scope="session")
def quick(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Quickstart:
    """Run it once, whichever worker comes first; the others wait for it."""
    base = tmp_path_factory.getbasetemp()
    folder = base if worker_id == "master" else base.parent
    out, record = folder / "quickstart" / "start", folder / "quickstart.json"
    with (folder / "quickstart.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not record.exists():
            record.write_text(json.dumps(run_quickstart(out)))
    answer, progress = json.loads(record.read_text())
    return Quickstart(out, answer, progress)


def run_quickstart(out: Path) -> tuple[Any, list[str]]:
    # One thread: the other workers need the other cores.
    environment = bare_environment(FORCE_COLOR="1")
    words = ["-c", LESS, "quickstart", "--out", str(out), "--json"]
    done = subprocess.run([sys.executable, *words], capture_output=True, env=environment, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr.decode()
    assert b"\x1b" not in done.stdout + done.stderr and done.stdout.count(b"\n") == 1
    return json.loads(done.stdout), done.stderr.decode().splitlines()
