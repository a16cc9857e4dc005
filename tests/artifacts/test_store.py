import errno
import os
import shutil
import stat
from pathlib import Path

import pytest

from kvcq.artifacts import disk, store
from kvcq.artifacts.bundle import draft_manifest, write_bundle
from kvcq.artifacts.fit_file import read_fit
from kvcq.artifacts.integrity import load_file
from kvcq.artifacts.report_file import read_report
from kvcq.artifacts.store import Staging
from kvcq.artifacts.verify import verify
from kvcq.errors import CorruptArtifactError, InputError, ResourceError
from tests.artifacts import example


def snapshot(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Fault:
    """Raise an error at the n-th write point: creating, flushing or renaming anything."""

    def __init__(self, monkeypatch, at, error):
        self.at, self.error, self.count = at, error, 0
        for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "mkdir"), (Path, "open")):
            monkeypatch.setattr(owner, name, self.wrap(getattr(owner, name)))

    def wrap(self, original):
        def call(*args, **kwargs):
            if kwargs.get("mode", args[1] if len(args) > 1 else "") != "rb":
                self.count += 1
                if self.count == self.at:
                    raise self.error
            return original(*args, **kwargs)

        return call


def write(kind, chain, target, force):
    if kind == "stats":
        return example.make_stats(target, force)
    fit, measured = read_fit(chain["fit"]), read_report(chain["report"])
    manifest = draft_manifest(fit, measured)
    return write_bundle(target, manifest, fit, measured, "# new\n", archive=kind == "archive", force=force)


def fault_points(kind, chain, tmp_path, force):
    with pytest.MonkeyPatch.context() as patch:
        fault = Fault(patch, -1, None)
        write(kind, chain, tmp_path / "target", force)
    return fault.count


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", ["stats", "bundle", "archive"])
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ResourceError),
        (OSError(errno.EACCES, "Permission denied"), InputError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_failure_at_any_write_point_leaves_everything_as_it_was(kind, chain, tmp_path, error, raised, force):
    old = tmp_path / "target"

    def reset():
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        if force:
            source = chain["archive" if kind == "archive" else kind]
            (shutil.copy if source.is_file() else shutil.copytree)(source, old)

    reset()
    points = fault_points(kind, chain, tmp_path, force)
    assert points >= 5
    reset()
    before = snapshot(tmp_path)
    after = None
    for at in range(1, points + 1):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(raised) as caught:
            Fault(patch, at, error)
            write(kind, chain, old, force)
        if raised is ResourceError:
            assert "No space left on device" in str(caught.value) and str(tmp_path) in str(caught.value)
        found = snapshot(tmp_path)
        if found != before:
            # The last flush comes after the rename: by then the new artifact is complete.
            after = at
            verify(old)
            assert [path.name for path in tmp_path.iterdir()] == ["target"]
            reset()
    assert after in (None, points)


def test_a_full_disk_found_by_the_system_leaves_nothing(chain, tmp_path):
    import resource
    import signal

    limit, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(ResourceError, match="cannot write"):
            example.make_fit(tmp_path / "deep" / "fit")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_outputs_are_never_overwritten_without_force(chain, tmp_path):
    target = tmp_path / "fit"
    example.make_fit(target)
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match="--force"):
        example.make_fit(target, seed=1)
    assert snapshot(tmp_path) == before
    example.make_fit(target, force=True, seed=1)
    assert snapshot(tmp_path) != before
    assert [path.name for path in tmp_path.iterdir()] == ["fit"]


def test_a_target_that_appears_during_the_work_is_kept(tmp_path):
    with pytest.raises(InputError, match="--force"), Staging(tmp_path / "a") as stage:
        stage.write("x.json", [b"1"])
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "mine").write_text("kept")
    assert snapshot(tmp_path) == {"a/mine": b"kept"}


def test_pack_may_replace_the_folder_it_read_from(chain, tmp_path):
    shutil.copytree(chain["fit"], tmp_path / "x")
    fit, measured = read_fit(tmp_path / "x"), read_report(chain["report"])
    for archive in (False, True, True, False):
        manifest = draft_manifest(fit, measured)
        write_bundle(tmp_path / "x", manifest, fit, measured, "# c\n", archive=archive, force=True)
        assert verify(tmp_path / "x").archive == archive


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors", "sub"])
def test_force_never_replaces_what_is_not_an_artifact(tmp_path, name):
    target = tmp_path / "home"
    target.mkdir()
    (target / name).mkdir() if name == "sub" else (target / name).write_text("mine")
    with pytest.raises(InputError, match="not a kvcq artifact"):
        example.make_fit(target, force=True)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="not a kvcq artifact"):
        example.make_fit(tmp_path / "file", force=True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a kvcq artifact"):
        example.make_fit(tmp_path / "pipe", force=True)
    assert (target / name).exists()


def test_force_replaces_an_empty_folder_and_a_broken_artifact(tmp_path):
    target = tmp_path / "fit"
    target.mkdir()
    example.make_fit(target, force=True)
    (target / "fit.json").write_text("broken")
    example.make_fit(target, force=True)
    verify(target)


def test_odd_targets_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "file").write_text("")
    for target, message in (
        ("link", "symbolic link"),
        (".", "not a path"),
        ("..", "not a path"),
        ("file/x", "Not a directory"),
    ):
        with pytest.raises(InputError, match=message):
            example.make_fit(Path(target))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_parents_are_created_with_the_artifact_and_modes_follow_the_umask(tmp_path):
    example.make_fit(tmp_path / "a" / "b")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o777 & ~mask


def test_other_errors_inside_the_block_pass_through(tmp_path):
    with pytest.raises(ZeroDivisionError), Staging(tmp_path / "a"):
        raise ZeroDivisionError
    with pytest.raises(ResourceError, match="quota"), Staging(tmp_path / "a"):
        raise OSError(errno.EDQUOT, "quota")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "raised"), [(errno.EIO, CorruptArtifactError), (errno.ENOMEM, ResourceError), (errno.EROFS, InputError)]
)
def test_system_errors_have_their_exit_code(number, raised):
    with pytest.raises(raised, match="here"), disk.disk_errors(Path("here")):
        raise OSError(number, os.strerror(number))
    with pytest.raises(InputError), disk.disk_errors(Path("here")):
        raise OSError("no number")


def test_a_name_that_is_taken_in_the_staging_folder_is_refused(tmp_path):
    with pytest.raises(InputError), Staging(tmp_path / "a") as stage:
        stage.write("x.json", [b"1"])
        stage.write("x.json", [b"2"])
    assert store.Staging(tmp_path / "a").folder.parent == tmp_path


def test_large_files_are_mapped_and_read_the_same(chain, monkeypatch):
    copied = load_file(chain["fit"] / "tensors.safetensors", 1 << 20)
    monkeypatch.setattr("kvcq.artifacts.integrity.COPY_LIMIT", 16)
    mapped = load_file(chain["fit"] / "tensors.safetensors", 1 << 20)
    assert mapped == copied and mapped.obj is not copied.obj
    verify(chain["fit"])


def test_a_file_that_shrinks_while_it_is_read_is_refused(chain, monkeypatch):
    monkeypatch.setattr("kvcq.artifacts.integrity.os.readv", lambda *_: 0)
    with pytest.raises(CorruptArtifactError, match="shrank"):
        verify(chain["fit"])
