"""The command as a process: streams, encodings, pipes, signals and what it imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chain import World, bare_environment, python
from tests.forked import Forked

KVCQ = ("-c", "from kvcq.cli.main import run; run()")
VERBS = (
    "quickstart",
    "collect",
    "merge",
    "fit",
    "validate",
    "pack",
    "serve",
    "inspect",
    "verify",
    "diff",
    "methods",
    "bench",
    "env",
)
HEAVY = ("torch", "transformers", "numpy")

IMPORTS = """
import contextlib, io, json, sys
from kvcq.cli.main import execute
seen = {}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = execute(words)
    heavy = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
    seen[" ".join(words)] = (code, len(out.getvalue()) > 0, heavy)
print(json.dumps(seen))
"""


def imports(words: list[list[str]], heavy: tuple[str, ...]) -> dict[str, list[object]]:
    """Run command lines in one fresh process; for each the exit code, whether it printed, and heavy modules so far."""
    done = python("-c", IMPORTS, json.dumps(words), json.dumps(heavy))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_help_of_every_verb_is_light() -> None:
    seen = imports([["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)], HEAVY)
    assert seen == {words: [0, True, []] for words in seen} and len(seen) == 15


def test_reading_artifacts_needs_no_torch(world: World, tmp_path: Path) -> None:
    archive = world.pack("nova", tmp_path / "it.kvcq", archive=True)
    paths = [archive, world.folder / "nova.kvcq", world.fits["oscar"], world.stats, world.report]
    words = [[verb, str(path)] for verb in ("verify", "inspect") for path in paths]
    words += [["diff", str(world.fits["oscar"]), str(world.fits["nova"])], ["methods"]]
    seen = imports(words, ("torch", "transformers"))
    assert seen == {key: [0, True, []] for key in seen} and len(seen) == 12


def small_collect(world: World, out: Path, *more: str) -> list[str]:
    words = ["collect", str(world.model), "--data", str(world.text), "--out", str(out)]
    return [*words, "--rows", "256", "--seq-len", "128", "--num-tokens", "1k", "--chunk", "64", *more]


def test_pipes_get_plain_lines_as_they_happen(world: World, tmp_path: Path) -> None:
    done = python(*KVCQ, *small_collect(world, tmp_path / "stats"), FORCE_COLOR="1", TTY_COMPATIBLE="1")
    assert done.returncode == 0, done.stderr
    assert b"\x1b" not in done.stdout + done.stderr and b"\r" not in done.stdout + done.stderr
    lines = done.stderr.decode().splitlines()
    assert "collecting" in lines and "self-check of the capture" in lines and "writing statistics" in lines
    assert not any("%|" in line or "Warning" in line for line in lines), lines
    assert done.stdout.startswith(b"statistics")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "C"])
def test_no_locale_ends_a_run(world: World, tmp_path: Path, encoding: str) -> None:
    """A report with signs and a model folder with an accent, in streams that know neither.

    In a pure C locale without Python's own remedies no library opens such a path, so there the name is plain.
    """
    model = tmp_path / ("plain" if encoding == "C" else "modèle-模型")
    model.symlink_to(world.model)
    words = ["validate", str(world.fits["nova"]), "--model", str(model), "--data", str(world.held_out)]
    words += ["--contexts", "96", "--no-canary", "--out", str(tmp_path / "report"), "--gates", str(tmp_path / "g.yaml")]
    (tmp_path / "g.yaml").write_text("gates: [{metric: kl, max: 10}]")
    if encoding == "C":
        # What an interpreter makes of its locale is settled before any line of ours runs.
        done = python(*KVCQ, *words, FORCE_COLOR="1", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        process = Forked(words, bare_environment(FORCE_COLOR="1"), encoding=encoding)
        out, err = process.communicate()
        code = process.wait()
    assert code == 0, err
    assert b"\x1b" not in out + err and b"PASS" in out


def test_json_is_alone_on_stdout(world: World, tmp_path: Path) -> None:
    words = ["validate", str(world.fits["nova"]), "--model", str(world.model), "--data", str(world.held_out)]
    words += ["--contexts", "96", "--no-canary", "--out", str(tmp_path / "report"), "--json"]
    done = python(*KVCQ, *words, FORCE_COLOR="1", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout.count(b"\n") == 1 and b"\x1b" not in done.stdout + done.stderr
    record = json.loads(done.stdout)
    assert record["report"]["artifacts"][1]["name"] == "nova"
    assert record["report"] == json.loads((tmp_path / "report" / "report.json").read_text())


@pytest.mark.parametrize("words", [["methods"], ["methods", "--json"], ["--help"], ["fit", "--help"]], ids=" ".join)
def test_a_reader_that_leaves_ends_the_run_quietly(words: list[str]) -> None:
    """As in ``kvcq methods | head -1``, with the reader gone before the first line."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, *KVCQ, *words]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=bare_environment(), check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_head_gets_its_line() -> None:
    shell = f'"{sys.executable}" {KVCQ[0]} "{KVCQ[1]}" methods | head -1; echo "${{PIPESTATUS[@]}}"'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, env=bare_environment(), check=False)
    assert (done.stdout, done.stderr) == (b"bf16\n0 0\n", b"")


def test_a_lost_reader_of_progress_does_not_end_the_work(world: World, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    words = ["fit", str(world.stats), "--method", "naive-int2", "--out", str(tmp_path / "fit")]
    done = subprocess.run(
        [sys.executable, *KVCQ, *words], stdout=subprocess.PIPE, stderr=write, env=bare_environment(), check=False
    )
    os.close(write)
    assert done.returncode == 0 and (tmp_path / "fit" / "fit.json").exists() and done.stdout.startswith(b"fit")


def test_closed_streams_are_no_error(world: World) -> None:
    shell = f'"{sys.executable}" {KVCQ[0]} "{KVCQ[1]}" verify "{world.folder}/nova.kvcq" >&- 2>&-'
    assert subprocess.run(["bash", "-c", shell], env=bare_environment(), check=False).returncode == 0


def test_an_error_is_one_plain_line(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 100) / ("y" * 100)
    done = python(*KVCQ, "verify", str(path), FORCE_COLOR="1", COLUMNS="40")
    assert done.returncode == 2 and done.stdout == b""
    assert done.stderr.count(b"\n") == 1 and done.stderr.startswith(b"error: ") and str(path).encode() in done.stderr
    assert b"\x1b" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "term"])
def test_a_signal_during_collect_leaves_nothing(world: World, tmp_path: Path, number: int, code: int) -> None:
    """The signal arrives in the first sequence: chunks of one token make it long. Later ones leave a checkpoint."""
    words = small_collect(world, tmp_path / "out" / "stats", "--chunk", "1", "--seq-len", "512", "--num-tokens", "2k")
    process: Forked | subprocess.Popen[bytes]
    if number == signal.SIGINT:
        process = Forked(words, bare_environment())
    else:
        process = subprocess.Popen(
            [sys.executable, *KVCQ, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=bare_environment(),
            start_new_session=True,
        )
    lines = []
    assert process.stderr is not None and process.stdout is not None
    for line in process.stderr:
        lines.append(line.decode().rstrip())
        if lines[-1] == "collecting":
            time.sleep(0.2)
            process.send_signal(number)
    assert process.wait(60) == code and process.stdout.read() == b""
    assert lines[-1].startswith("error: ") and "run the same command again" in lines[-1]
    assert sum(line.startswith("error: ") for line in lines) == 1 and not any("Traceback" in line for line in lines)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="pseudo terminals")
def test_a_terminal_gets_a_bar_and_no_color_keeps_it_colourless(world: World, tmp_path: Path) -> None:
    import pty
    import re

    parent, child = pty.openpty()
    environment = bare_environment(TERM="xterm-256color", NO_COLOR="1")
    words = ["fit", str(world.stats), "--method", "oscar", "--out", str(tmp_path / "fit")]
    process = subprocess.Popen([sys.executable, *KVCQ, *words], stdout=subprocess.PIPE, stderr=child, env=environment)
    os.close(child)
    shown = b""
    while True:
        try:
            data = os.read(parent, 65536)
        except OSError:
            break
        if not data:
            break
        shown += data
    os.close(parent)
    assert process.stdout is not None and process.stdout.read().startswith(b"fit")
    assert process.wait(60) == 0 and b"fitting oscar" in shown
    # Colours are SGR codes 30-49 and 90-107; moving the cursor and bold are no colours.
    assert not re.search(rb"\x1b\[(?:\d+;)*(?:3\d|4\d|9\d|10\d)(?:;\d+)*m", shown)
