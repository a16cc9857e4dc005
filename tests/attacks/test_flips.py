"""Any flipped byte of any file fails verify."""

import pytest

from kvcq.artifacts.verify import verify
from kvcq.errors import CorruptArtifactError
from tests.attacks.hostile import copy, flipped, generator, positions


def assert_every_flip_fails(path, artifact, every):
    rng = generator()
    data = path.read_bytes()
    for position in range(len(data)) if every else positions(len(data), rng):
        path.write_bytes(flipped(data, position, rng))
        with pytest.raises(CorruptArtifactError) as caught:
            verify(artifact)
        assert "\n" not in str(caught.value)
    path.write_bytes(data)
    verify(artifact)


@pytest.mark.parametrize("kind", ["bundle", "fit", "stats", "report"])
def test_any_flipped_byte_of_a_folder_fails(chain, tmp_path, kind):
    folder = copy(chain, kind, tmp_path)
    for path in sorted(folder.iterdir()):
        assert_every_flip_fails(path, folder, every=path.name == "kvcq.json")


def test_any_flipped_byte_of_an_archive_fails(chain, tmp_path):
    archive = copy(chain, "archive", tmp_path)
    assert_every_flip_fails(archive, archive, every=False)


def test_every_byte_outside_the_contents_of_an_archive_fails(chain, tmp_path):
    """Headers, padding and the end marker: what a hash of the files would not cover."""
    import tarfile

    archive = copy(chain, "archive", tmp_path)
    data = archive.read_bytes()
    with tarfile.open(archive) as tar:
        contents = [range(member.offset_data, member.offset_data + member.size) for member in tar]
    rng = generator()
    for position in range(len(data)):
        if not any(position in content for content in contents):
            archive.write_bytes(flipped(data, position, rng))
            with pytest.raises(CorruptArtifactError):
                verify(archive)


@pytest.mark.parametrize("kind", ["bundle", "archive", "fit", "stats", "report"])
def test_any_cut_or_extension_fails(chain, tmp_path, kind):
    artifact = copy(chain, kind, tmp_path)
    for path in sorted(artifact.iterdir()) if artifact.is_dir() else [artifact]:
        data = path.read_bytes()
        for changed in (data[:20], data[:-8], data[:-1], data + b"\0", data + b"\0" * 512, data + b"ab"):
            if changed == data:
                continue
            path.write_bytes(changed)
            with pytest.raises(CorruptArtifactError):
                verify(artifact)
        path.write_bytes(data)
