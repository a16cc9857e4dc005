"""Hostile folders, archives and names: every one ends in one line and reads nothing outside."""

import os
import tarfile

import pytest

from kvcq.artifacts import integrity, kinds
from kvcq.artifacts.archive import archive_chunks
from kvcq.artifacts.verify import detect, verify
from kvcq.errors import CorruptArtifactError, MismatchError
from kvcq.spec import canonical
from tests.artifacts.example import make_fit
from tests.attacks.hostile import SEALED, copy, edit_header, relist

FOLDERS = ["bundle", "fit", "stats", "report"]


def refused(path, message=None):
    with pytest.raises(CorruptArtifactError, match=message) as caught:
        verify(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("kind", FOLDERS)
def test_missing_and_unlisted_files_are_refused(chain, tmp_path, kind):
    for name in [path.name for path in chain[kind].iterdir()]:
        folder = copy(chain, kind, tmp_path / name)
        (folder / name).unlink()
        if name != "report.json" or kind == "bundle":
            refused(folder, "missing")
        (folder / name).write_bytes((chain[kind] / name).read_bytes())
        (folder / "\x1b[31mextra.bin").write_bytes(b"x")
        refused(folder, r"unlisted file '\\x1b\[31mextra.bin'")


@pytest.mark.parametrize("kind", FOLDERS)
def test_links_folders_and_pipes_are_refused(chain, tmp_path, kind):
    name = SEALED[kind]
    for i, make in enumerate(
        (
            lambda path: path.symlink_to(chain[kind] / name),
            lambda path: path.symlink_to("/dev/zero"),
            lambda path: path.mkdir(),
            os.mkfifo,
        )
    ):
        folder = copy(chain, kind, tmp_path / str(i))
        (folder / name).unlink()
        make(folder / name)
        refused(folder, "among the files")


def test_a_link_put_in_place_after_listing_is_not_followed(chain, tmp_path):
    folder = copy(chain, "fit", tmp_path)
    files = integrity.open_files(folder)
    (folder / "fit.json").unlink()
    (folder / "fit.json").symlink_to(chain["fit"] / "fit.json")
    with pytest.raises(CorruptArtifactError, match="symbolic link"):
        files.load("fit.json")
    (folder / "fit.json").unlink()
    os.mkfifo(folder / "fit.json")
    with pytest.raises(CorruptArtifactError, match="not a regular file"):
        files.load("fit.json")


def test_sizes_are_checked_before_reading(chain, tmp_path, monkeypatch):
    folder = copy(chain, "bundle", tmp_path)
    with (folder / "kvcq.json").open("r+b") as file:
        file.truncate(1 << 40)
    refused(folder, "more than the")
    folder = copy(chain, "bundle", tmp_path / "b")
    with (folder / "kvcq.safetensors").open("r+b") as file:
        file.truncate(1 << 35)
    edit_header(folder, "bundle", lambda header: header["files"][2].update(size=1 << 35))
    refused(folder, "bytes of tensors")
    monkeypatch.setattr(integrity, "MAX_FILES", 2)
    refused(folder, "more than 2 files")
    with (folder / "big").open("wb") as file:
        file.truncate(1 << 40)
    monkeypatch.setattr(integrity, "ARCHIVE_CAP", 1 << 30)
    with pytest.raises(CorruptArtifactError, match="more than the"):
        verify(folder / "big")


@pytest.mark.parametrize("name", ["kvcq.json", "kvcq.safetensors", "README.md"])
def test_a_git_lfs_pointer_is_recognised(chain, tmp_path, name):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
    folder = copy(chain, "bundle", tmp_path)
    (folder / name).write_bytes(pointer)
    with pytest.raises(CorruptArtifactError, match=r"Git LFS pointer.*git lfs pull"):
        verify(folder)
    (tmp_path / "x.kvcq").write_bytes(pointer)
    with pytest.raises(CorruptArtifactError, match="Git LFS pointer"):
        verify(tmp_path / "x.kvcq")


@pytest.mark.parametrize(
    "name", ["../kvcq.json", "/etc/passwd", "C:\\a.json", "KVCQ.json", "a/b.json", "é.json", "", "a"]
)
def test_hostile_file_names_in_a_header_are_refused(chain, tmp_path, name):
    for kind in FOLDERS:
        folder = copy(chain, kind, tmp_path / kind)
        edit_header(folder, kind, lambda header: header["files"][0].update(name=name))
        refused(folder, r"files\.0\.name")


# Names that a person, a case-insensitive disk or a Unicode form would take for one of ours.
ALIKE = ("KVCQ.JSON", "kvcq.jsоn", "ｋvcq.json", "kvcq.json ", ".kvcq.json", "kvcq.json.bak", "kvcq\u200b.json")


@pytest.mark.parametrize("name", ALIKE)
def test_look_alike_files_are_unlisted_files(chain, tmp_path, name):
    folder = copy(chain, "bundle", tmp_path)
    (folder / name).write_bytes((folder / "kvcq.json").read_bytes())
    refused(folder, "unlisted file")
    (folder / "kvcq.json").unlink()
    refused(folder, r"incomplete bundle: kvcq.json is missing")


def test_two_forms_of_one_name_are_two_files(chain, tmp_path):
    folder = copy(chain, "report", tmp_path)
    for name in ("caf\u00e9.json", "cafe\u0301.json"):
        (folder / name).write_bytes(b"{}")
        refused(folder, "unlisted file")
        (folder / name).unlink()
    verify(folder)


def test_a_hard_link_is_a_file_whose_content_must_match(chain, tmp_path):
    """Caches share files by hard links, so they are allowed; what they lead to is hashed like everything else."""
    folder = copy(chain, "bundle", tmp_path)
    outside = tmp_path / "outside"
    (folder / "README.md").rename(outside)
    (folder / "README.md").hardlink_to(outside)
    verify(folder)
    secret = tmp_path / "secret"
    secret.write_text("password")
    (folder / "README.md").unlink()
    (folder / "README.md").hardlink_to(secret)
    refused(folder, "README.md is too long: 8 bytes of 7")


def test_force_never_writes_through_a_hard_link(chain, tmp_path):
    folder = copy(chain, "fit", tmp_path)
    kept = tmp_path / "kept.json"
    kept.hardlink_to(folder / "fit.json")
    before = kept.read_bytes()
    make_fit(folder, force=True, seed=5)
    assert kept.read_bytes() == before != (folder / "fit.json").read_bytes()


def test_devices_and_sockets_are_refused(chain, tmp_path):
    import socket

    for device in ("/dev/zero", "/dev/null"):
        with pytest.raises(CorruptArtifactError, match="not a regular file"):
            verify(device)
    folder = copy(chain, "bundle", tmp_path)
    (folder / "README.md").unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "README.md"))
        refused(folder, "folder or device 'README.md'")


def test_a_link_to_the_whole_artifact_is_followed_and_one_inside_is_not(chain, tmp_path):
    """The user names the artifact; the artifact names nothing outside."""
    (tmp_path / "link").symlink_to(chain["bundle"])
    verify(tmp_path / "link")
    (tmp_path / "it.kvcq").symlink_to(chain["archive"])
    refused(tmp_path / "it.kvcq", "symbolic link")


@pytest.mark.parametrize("kind", FOLDERS)
def test_header_may_not_list_other_files_than_its_kind(chain, tmp_path, kind):
    def extra(header):
        header["files"].append({"name": "zz.json", "size": 1, "sha256": "0" * 64})

    folder = copy(chain, kind, tmp_path)
    (folder / "zz.json").write_bytes(b"1")
    edit_header(folder, kind, extra)
    refused(folder, "list|files")
    edit_header(folder, kind, lambda header: header.update(files=header["files"][:1] * 3))
    refused(folder, "list|files")


@pytest.mark.parametrize("version", [0, 2, 999, True, "1", None])
@pytest.mark.parametrize("kind", FOLDERS)
def test_another_version_is_refused_by_its_number(chain, tmp_path, kind, version):
    folder = copy(chain, kind, tmp_path)
    edit_header(folder, kind, lambda header: header.update(version=version))
    with pytest.raises(MismatchError, match=rf"format version '?{version}'?; kvcq .* reads version 1") as caught:
        verify(folder)
    assert caught.value.exit_code == 5
    if kind in ("stats", "bundle"):
        assert "install kvcq 0.1.0 to read it" in str(caught.value)
    unsealed = (folder / SEALED[kind]).read_bytes().replace(b'"got_tokens":4096', b'"got_tokens":4097')
    (folder / SEALED[kind]).write_bytes(unsealed)
    refused(folder, "digest does not match.*reads version 1")


def test_a_later_format_that_names_no_writer_is_refused(chain, tmp_path):
    for versions in ({}, {"kvcq": "x\x1b[0m"}, 3):
        folder = copy(chain, "fit", tmp_path / str(versions))
        edit_header(folder, "fit", lambda header, v=versions: header.update(version=2, versions=v))
        with pytest.raises(MismatchError, match="of a later release"):
            verify(folder)


def swap(old, new):
    return lambda data: data.replace(old, new, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: b" " + data,
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.decode().encode("utf-16"),
        swap(b'"seed":0', b'"seed": 0'),
        swap(b'"seed":0', b'"seed":0,"seed":0'),
        swap(b'"seed":0', b'"seed":-0'),
        swap(b'"seed":0', b'"seed":00'),
        swap(b'"seed":0', b'"seed":NaN'),
        swap(b'"seed":0', b'"seed":1e400'),
        swap(b'"seed":0', b'"seed":' + b"9" * 5000),
        swap(b'"seed":0', b'"seed":"\\ud800"'),
        swap(b'"seed":0', b'"s\\u0065ed":0'),
        lambda data: b"[" * 100000,
        lambda data: b'{"a":' * 100000,
        lambda data: b"[]\n",
        lambda data: b"null\n",
        lambda data: b"",
        lambda data: b"\0" * 64,
    ],
)
def test_json_that_is_not_canonical_is_refused(chain, tmp_path, change):
    folder = copy(chain, "bundle", tmp_path)
    data = (folder / "kvcq.json").read_bytes()
    changed = change(data)
    assert changed != data
    (folder / "kvcq.json").write_bytes(changed)
    refused(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(code="import os"), "code: Extra"),
        (lambda h: h["recipe"].update(__class__="x"), "recipe"),
        (lambda h: h.pop("plan"), "plan: Field required"),
        (lambda h: h["recipe"].pop("seed"), "left out or has another type"),
        (lambda h: h["recipe"].update(seed="0"), "left out or has another type"),
        (lambda h: h["recipe"].update(seed=-1), "recipe.seed"),
        (lambda h: h["plan"][0]["k"].update(transform="torch.load"), "transform"),
        (lambda h: h["plan"][0]["k"].update(clip=2.0), "clip"),
        (lambda h: h["recipe"]["windows"].update(recent=-5), "recent"),
        (lambda h: h.update(format="kvcq.fit"), "not a kvcq.bundle file"),
        (lambda h: h["validation"].update(report_sha256="1" * 64), "summary differs"),
        (lambda h: h["validation"]["gates"][0].update(passed=False), "summary differs"),
        (lambda h: h["validation"]["contexts"][0]["metrics"].update(kl=0.0), "summary differs"),
        (lambda h: h["bits"][0].update(total=2.25), "summary differs"),
        (lambda h: h.update(constants_bytes=0), "summary differs"),
        (lambda h: h["folds"][0].update(fold=False), "summary differs"),
        (lambda h: h["identity"].update(vocabulary="1" * 64), "not of these tensors"),
        (lambda h: h["recipe"]["windows"].update(sink=1), "not of these tensors"),
    ],
)
def test_a_manifest_sealed_with_other_content_is_refused(chain, tmp_path, change, message):
    folder = copy(chain, "bundle", tmp_path)
    edit_header(folder, "bundle", change)
    refused(folder, message)


def test_canary_and_report_of_another_run_are_refused(chain, tmp_path):
    folder = copy(chain, "bundle", tmp_path)
    (folder / "canary.safetensors").write_bytes((folder / "kvcq.safetensors").read_bytes())
    relist(folder, "bundle")
    refused(folder, "canary is not the one")
    folder = copy(chain, "bundle", tmp_path / "b")
    edit_header(folder, "report", lambda h: h["artifacts"][0].update(tensors_digest=None))
    relist(folder, "bundle")
    refused(folder, "report is not of these tensors")
    (folder / "README.md").write_bytes(b"\xff")
    folder2 = copy(chain, "bundle", tmp_path / "c")
    (folder2 / "README.md").write_bytes(b"\xff")
    relist(folder2, "bundle")
    with pytest.raises(CorruptArtifactError, match="UTF-8"):
        verify(folder2)


def members(path):
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def test_archives_with_another_encoding_are_refused(chain, tmp_path):
    files = members(chain["archive"])
    good = chain["archive"].read_bytes()
    assert b"".join(archive_chunks(files)) == good
    path = tmp_path / "x.kvcq"
    backwards = b"".join(bytes(c) for name in reversed(files) for c in list(archive_chunks({name: files[name]}))[:-1])
    for data in (
        b"",
        good[:511],
        good + bytes(1024),
        good[:-1024],
        good[512:],
        backwards + bytes(1024),
        good[: -len(good) + 512] * 2 + good[512:],
        bytes(1024),
    ):
        path.write_bytes(data)
        with pytest.raises(CorruptArtifactError):
            verify_archive(path)


def verify_archive(path):
    from kvcq.errors import InputError

    try:
        verify(path)
    except InputError as error:
        # An archive of nothing is canonical, and holds no artifact.
        assert path.read_bytes() == bytes(1024)
        raise CorruptArtifactError(str(error)) from error


@pytest.mark.parametrize("name", ["../x.json", "/etc/x.json", "a" * 90 + ".json", "kvcq.json"])
def test_hostile_archive_members_are_refused(chain, tmp_path, name):
    path = tmp_path / "x.kvcq"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for member in ("kvcq.json", name):
            tar.add(chain["bundle"] / "kvcq.json", arcname=member, recursive=False)
    refused(path, "not a canonical kvcq archive")
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
        with tarfile.open(path, "w") as tar:
            info = tarfile.TarInfo("kvcq.json")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        refused(path, "not a canonical kvcq archive")


def test_an_error_never_steers_the_terminal(chain, tmp_path):
    folder = copy(chain, "bundle", tmp_path / "\x1b]0;owned\x07\u202e")
    (folder / "kvcq.json").write_bytes(b"{}")
    with pytest.raises(CorruptArtifactError) as caught:
        verify(folder)
    assert str(caught.value).isprintable() and r"\x1b]0;owned\x07\u202e" in str(caught.value)


def test_an_archive_of_another_kind_is_refused(chain, tmp_path):
    path = tmp_path / "x.kvcq"
    path.write_bytes(b"".join(archive_chunks({p.name: p.read_bytes() for p in chain["fit"].iterdir()})))
    refused(path, "archive without kvcq.json")
    assert detect(path) == "fit" and kinds.size_cap("x.bin") == kinds.MIB


def test_any_json_value_in_place_of_a_header_is_one_error(chain, tmp_path):
    folder = copy(chain, "bundle", tmp_path)
    for value in ({}, {"digest": "x"}, {"format": 3, "version": []}, "text", 1, [{}]):
        plain = (
            dict(value, digest=canonical.digest(value)) if isinstance(value, dict) and "digest" not in value else value
        )
        (folder / "kvcq.json").write_bytes(canonical.dumps(plain))
        refused(folder)
