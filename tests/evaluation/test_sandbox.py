from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvcq.evaluation.questions import Case
from kvcq.evaluation.scoring.code import code
from kvcq.evaluation.scoring.sandbox import run_program

GOOD, WRONG = "def twice(x):\n    return 2 * x", "def twice(x):\n    return x"
CHECK = "def check(f):\n    assert f(2) == 4\n    assert f(-1) == -2"


def judged(program: str, tests: str | tuple[Case, ...] = CHECK, entry: str | None = "twice") -> tuple[float, str]:
    verdict = code(f"```python\n{program}\n```", "", tests, entry, 5.0)
    return verdict.score, verdict.note


def test_solutions_are_right_if_they_pass_all_tests() -> None:
    assert judged(GOOD) == (1.0, "")
    assert judged(WRONG) == (0.0, "AssertionError")
    assert judged(GOOD, "assert twice(3) == 6", None) == (1.0, "")
    assert judged("def twice(x)", CHECK)[1].startswith("SyntaxError")


@pytest.mark.parametrize("end", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"])
def test_a_program_that_ends_before_its_tests_has_not_passed_them(end: str) -> None:
    assert judged(f"{WRONG}\n{end}") == (0.0, "ended before its tests")


def test_a_main_guard_runs_for_cases_and_not_for_tests() -> None:
    program = "def main():\n    print(int(input()) * 2)\n\nif __name__ == '__main__':\n    main()"
    cases = (Case(input="3\n", output="6\n"), Case(input="5", output="10  \n"))
    assert judged(program, cases, None) == (1.0, "")
    assert judged(program, (*cases, Case(input="1", output="3")), None) == (0.0, "case 3: another output")
    assert judged(program, "main", None)[0] == 1.0
    assert judged(program, (Case(input="x", output="0"),), None)[1].startswith("case 1: ValueError")


@pytest.mark.parametrize("program", ["while True: pass", "import time\ntime.sleep(60)"])
def test_endless_programs_end_with_their_time(program: str) -> None:
    started = time.monotonic()
    outcome = run_program(program, seconds=0.5)
    assert (outcome.finished, outcome.exit_code, outcome.note) == (False, None, "time limit")
    assert time.monotonic() - started < 5


def test_memory_is_limited() -> None:
    assert run_program("x = bytearray(16 << 30)").note == "MemoryError"
    assert not run_program("x = []\nwhile True: x.append(bytearray(16 << 20))", memory=200 << 20).finished


def test_output_is_limited() -> None:
    outcome = run_program("while True: print('x' * (1 << 20))")
    assert not outcome.finished and "File too large" in outcome.note and len(outcome.stdout) <= (16 << 20) + 1


@pytest.mark.parametrize(
    "program",
    [
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.system('true')",
        "import multiprocessing as m; m.get_context('spawn').Process(target=print).start()",
        "import os; os.kill(os.getppid(), 0)",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
    ],
)
def test_processes_signals_and_network_are_denied(program: str) -> None:
    outcome = run_program(program)
    assert not outcome.finished and "denied" in outcome.note


@pytest.mark.parametrize(
    "attempt",
    ["open({path!r}, 'w')", "import os; os.open({path!r}, os.O_CREAT | os.O_WRONLY)", "import os; os.mkdir({path!r})",
     "import pathlib; pathlib.Path({path!r}).touch()", "import os; os.symlink({path!r}, 'x')"],
)  # fmt: skip
def test_nothing_is_written_outside(tmp_path: Path, attempt: str) -> None:
    outcome = run_program(attempt.format(path=str(tmp_path / "stray")))
    assert "denied" in outcome.note and list(tmp_path.iterdir()) == []


def test_nothing_is_removed_outside(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("x")
    for attempt in (f"import os; os.remove({str(kept)!r})", f"import shutil; shutil.rmtree({str(tmp_path)!r})"):
        assert "denied" in run_program(attempt).note and kept.read_text() == "x"


def test_work_within_the_folder_and_threads_are_fine() -> None:
    program = (
        "import asyncio, os, threading, tempfile\n"
        "open('a', 'w').write('b'); os.rename('a', 'c'); os.remove('c')\n"
        "threading.stack_size(1 << 26)\n"
        "t = threading.Thread(target=print, args=('done',)); t.start(); t.join()\n"
        "asyncio.run(asyncio.sleep(0))\n"
    )
    outcome = run_program(program)
    assert (outcome.finished, outcome.stdout) == (True, "done\n"), outcome.note


def test_the_environment_is_empty_and_the_folder_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    outcome = run_program("import os; print(os.getcwd()); print('abc' in os.environ.values())")
    folder, leaked = outcome.stdout.split()
    assert leaked == "False" and not os.path.exists(folder) and not Path(folder).parent.exists()  # noqa: PTH110
