"""One quickstart on the real model for all end-to-end tests."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.chain import bare_environment


@dataclass(frozen=True)
class Quickstart:
    """The finished process."""

    out: Path
    answer: dict[str, Any]
    progress: list[str]


@pytest.fixture(scope="session")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Quickstart:
    out = tmp_path_factory.mktemp("quick") / "start"
    environment = bare_environment(FORCE_COLOR="1")
    # All cores: the model is real.
    del environment["OMP_NUM_THREADS"]
    words = ["-m", "kvcq", "quickstart", "--out", str(out), "--json"]
    done = subprocess.run([sys.executable, *words], capture_output=True, env=environment, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr.decode()
    assert b"\x1b" not in done.stdout + done.stderr and done.stdout.count(b"\n") == 1
    return Quickstart(out, json.loads(done.stdout), done.stderr.decode().splitlines())
