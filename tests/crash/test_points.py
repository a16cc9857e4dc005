"""Death, a full disk and a read-only folder at every write point of every verb."""

from __future__ import annotations

import errno
import os
import shutil

import pytest

from kvcq.artifacts.verify import verify
from tests.crash.faults import KILLED, Faults, die, failing
from tests.crash.verbs import Bench, points_of, refused, sealed

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="needs fork")]
VERBS = ("collect", "merge", "fit", "validate", "pack", "archive")
References = dict[str, dict[str, str]]


def judge(bench: Bench, verb: str, allowed: list[dict[str, str]]) -> None:
    """Whatever stands under the name is complete, and nothing beside it passes for an artifact unless it is whole."""
    out = bench.out(verb)
    for path in bench.folder.iterdir():
        if path == out:
            verify(out)
            assert sealed(out) in allowed
        elif not refused(path):
            assert sealed(path) in allowed and "checkpoint" not in path.name


@pytest.mark.parametrize("verb", VERBS)
def test_a_writer_that_dies_anywhere_leaves_nothing_that_passes_for_complete(
    bench: Bench, references: References, verb: str
) -> None:
    """And the same command, with --resume for collect, then writes what an undisturbed run writes."""
    out, reference = bench.out(verb), references[verb]
    words, more = bench.words(verb, out), ["--resume"] if verb == "collect" else []
    resumed = 0
    for at in range(1, points_of(bench, verb, removals=True) + 1):
        bench.clear()
        assert bench.run(words, Faults(bench.folder, at, die, removals=True)).code == KILLED
        judge(bench, verb, [reference])
        resumed += (bench.folder / ".it.checkpoint").exists()
        if out.exists():
            # It died after the rename: only leftovers are to be cleared.
            assert bench.run([*words, *more]).code == 2
        assert bench.run([*words, *more, *["--force"] * out.exists()]).code == 0
        assert sealed(out) == reference
        assert list(bench.folder.iterdir()) == [out], at
    assert (resumed > 10) == (verb == "collect")


@pytest.mark.parametrize("verb", ["fit", "archive"])
def test_a_replacement_that_dies_anywhere_leaves_the_old_or_the_new_one(
    bench: Bench, references: References, verb: str
) -> None:
    out, reference = bench.out(verb), references[verb]
    words = [*bench.words(verb, out), "--force"]
    source = bench.world.fits["naive-int2"] if verb == "fit" else bench.world.folder / "nova.kvcq"
    old = sealed(source)
    shutil.copytree(source, out)
    moved = 0
    for at in range(1, points_of(bench, verb, "--force", removals=True) + 1):
        bench.clear()
        shutil.copytree(source, out)
        assert bench.run(words, Faults(bench.folder, at, die, removals=True)).code == KILLED
        judge(bench, verb, [old, reference])
        moved += not out.exists()
        verify(out)  # reading brings back what was just being replaced
        assert sealed(out) in (old, reference)
        assert bench.run(words).code == 0
        assert sealed(out) == reference and list(bench.folder.iterdir()) == [out], at
    assert moved >= 1


@pytest.mark.parametrize(
    ("verb", "number", "code"),
    [*((verb, errno.ENOSPC, 6) for verb in VERBS), ("fit", errno.EROFS, 2), ("archive", errno.EACCES, 2)],
)
def test_a_disk_that_refuses_any_write_leaves_nothing(
    bench: Bench, references: References, verb: str, number: int, code: int
) -> None:
    """One line and the exit code; a checkpoint that cannot be written is a warning, and the collection goes on."""
    out = bench.out(verb)
    words = bench.words(verb, out)
    for at in range(1, points_of(bench, verb, removals=False) + 1):
        bench.clear()
        ended = bench.run(words, Faults(bench.folder, at, failing(number), removals=False))
        judge(bench, verb, [references[verb]])
        left = [path for path in bench.folder.iterdir() if path != out]
        if ended.code == 0:
            assert verb == "collect" and any("no checkpoint" in line for line in ended.lines), (at, ended)
            assert out.exists() and not left
            continue
        assert ended.code == code and len(ended.errors) == 1 and os.strerror(number) in ended.errors[0], (at, ended)
        assert left in ([], [bench.folder / ".it.checkpoint"]), at
        if left:
            assert bench.run([*words, "--resume", *["--force"] * out.exists()]).code == 0
            assert sealed(out) == references[verb]
