"""One writer an output; what a dead one left is taken over; signals end with their exit code."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcq.artifacts import lock
from kvcq.artifacts.claim import claim, restore
from kvcq.artifacts.verify import verify
from kvcq.errors import InputError
from kvcq.pipeline.fit import fit
from kvcq.pipeline.requests import FitRequest
from tests.chain import World, bare_environment, contents
from tests.crash.verbs import Bench, sealed
from tests.forked import Forked

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs fork and file locks")


def in_child(job: Callable[[], None]) -> int:
    """Run a job in a forked child and return the child's id; it exits with 0 after the job."""
    child = os.fork()
    if child == 0:
        try:
            job()
        finally:
            os._exit(0)
    return child


@pytest.fixture
def owned(tmp_path: Path):
    """An output that another process is writing; yields (output, its process id)."""
    read, write = os.pipe()

    def hold() -> None:
        with claim(tmp_path / "it"):
            os.write(write, b"held")
            time.sleep(60)

    child = in_child(hold)
    assert os.read(read, 4) == b"held"
    yield tmp_path / "it", child
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_second_writer_is_refused_and_told_who_the_first_is(world: World, owned: tuple[Path, int]) -> None:
    out, owner = owned
    with pytest.raises(InputError) as caught:
        fit(FitRequest(stats=world.stats, out=out, method="naive-int2"))
    line = str(caught.value)
    assert f"process {owner} on {platform.node()}" in line and str(out) in line and "\n" not in line
    assert [path.name for path in out.parent.iterdir()] == [".it.lock"]
    fit(FitRequest(stats=world.stats, out=out.parent / "other", method="naive-int2"))
    fit(FitRequest(stats=world.stats, out=out, method="naive-int2", dry_run=True))


def test_the_lock_of_a_dead_process_is_taken_over(world: World, tmp_path: Path) -> None:
    def die() -> None:
        with claim(tmp_path / "it"):
            (tmp_path / ".it.staging").mkdir()
            (tmp_path / ".it.staging" / "tensors.safetensors").write_bytes(b"half")
            os._exit(9)

    os.waitpid(in_child(die), 0)
    assert {path.name for path in tmp_path.iterdir()} == {".it.lock", ".it.staging"}
    fit(FitRequest(stats=world.stats, out=tmp_path / "it", method="naive-int2"))
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_leftovers_of_a_living_writer_stay(world: World, owned: tuple[Path, int]) -> None:
    out, _ = owned
    (out.parent / ".it.staging").mkdir()
    (out.parent / ".it.old").mkdir()
    for _ in range(2):
        with pytest.raises(InputError, match="is writing this output"):
            fit(FitRequest(stats=world.stats, out=out, method="naive-int2"))
        with pytest.raises(InputError, match="is writing this output"):
            verify(out)
    assert {path.name for path in out.parent.iterdir()} == {".it.lock", ".it.staging", ".it.old"}


def test_a_thread_may_enter_its_own_claim_and_another_may_not(tmp_path: Path) -> None:
    refused: list[str] = []

    def other() -> None:
        try:
            with claim(tmp_path / "it"):
                refused.append("nobody")
        except InputError as error:
            refused.append(str(error))

    with claim(tmp_path / "it"), claim(tmp_path / "x" / ".." / "it"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(refused) == 1 and f"process {os.getpid()}" in refused[0]
    assert not [path for path in tmp_path.iterdir() if path.name != "x"]


def test_what_is_not_ours_is_never_cleared(tmp_path: Path, world: World) -> None:
    (tmp_path / ".it.staging").mkdir()
    (tmp_path / ".it.staging" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"in the way.*\.it\.staging"):
        fit(FitRequest(stats=world.stats, out=tmp_path / "it", method="naive-int2"))
    assert (tmp_path / ".it.staging" / "thesis.txt").read_text() == "mine"
    (tmp_path / ".x.staging").symlink_to(tmp_path / ".it.staging")
    with pytest.raises(InputError, match="in the way"), claim(tmp_path / "x"):
        pass


def test_reading_brings_back_what_a_killed_replacement_moved_aside(world: World, tmp_path: Path) -> None:
    fit(FitRequest(stats=world.stats, out=tmp_path / "it", method="naive-int2"))
    before = contents(tmp_path / "it")
    (tmp_path / "it").rename(tmp_path / ".it.old")
    verify(tmp_path / "it")
    assert contents(tmp_path / "it") == before and [path.name for path in tmp_path.iterdir()] == ["it"]
    restore(tmp_path / "it")
    assert contents(tmp_path / "it") == before


def test_a_lock_that_is_removed_while_it_is_taken_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner ends between open and flock: the file that was opened is no longer the one that others see."""
    path, original, calls = tmp_path / "lock", lock.fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            path.unlink()
        original(descriptor, operation)

    monkeypatch.setattr(lock.fcntl, "flock", late)
    held = lock.FileLock(path, tmp_path / "it")
    assert len(calls) == 2 and path.read_text().startswith("process ")
    held.release()
    assert not path.exists()


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    with pytest.raises(InputError, match="no file locks"), claim(tmp_path / "deep" / "it"):
        pass


def test_writers_that_share_a_new_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    failed = []

    def write(name: str) -> None:
        for _ in range(100):
            try:
                with claim(tmp_path / "new" / "deep" / name):
                    pass
            except BaseException as error:
                failed.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Whoever made a folder cannot remove it while another one is in it: an empty folder may stay.
    assert not failed and not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "term"])
def test_an_interrupted_collect_names_the_command_that_continues(
    bench: Bench, references: dict[str, dict[str, str]], number: int, code: int
) -> None:
    out = bench.folder / "it"
    words = bench.words("collect", out)
    words += ["--chunk", "1"]
    process: Forked | subprocess.Popen[bytes]
    if number == signal.SIGINT:
        process = Forked(words, bare_environment())
    else:
        command = [sys.executable, "-c", "from kvcq.cli.main import run; run()", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=bare_environment())
    while not (bench.folder / ".it.checkpoint").exists() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(number)
    shown, lines = process.communicate(timeout=60)
    last = lines.decode().splitlines()[-1]
    assert process.returncode == code and shown == b"", lines
    assert (
        last.startswith("error: ") and last.endswith("run the same command with --resume") and "Traceback" not in last
    )
    assert [path.name for path in bench.folder.iterdir()] == [".it.checkpoint"]
    assert bench.run([*words, "--resume"]).code == 0
    assert bench.run([*words, "--out", str(bench.folder / "whole")]).code == 0
    assert sealed(out) == sealed(bench.folder / "whole")


def test_a_second_ctrl_c_ends_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcq.cli import main
    from kvcq.errors import Interrupted

    read, write = os.pipe()

    def stubborn(_: object) -> int:
        try:
            os.write(write, b"1")
            time.sleep(60)
        except Interrupted:
            os.write(write, b"2")
            time.sleep(60)
        return 0

    monkeypatch.setattr(main, "execute", stubborn)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    child = in_child(main.run)
    started = time.monotonic()
    for expected in (b"1", b"2"):
        assert os.read(read, 1) == expected
        os.kill(child, signal.SIGINT)
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == -signal.SIGINT and time.monotonic() - started < 30
