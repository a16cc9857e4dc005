"""Small files that ask for large memory or long time: each is refused within 2 s and 300 MB, measured in a child."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcq.artifacts import integrity
from kvcq.artifacts.bundle import open_bundle
from kvcq.artifacts.verify import verify
from kvcq.errors import CorruptArtifactError, InputError, ResourceError
from kvcq.evaluation.gates import load_gates
from kvcq.pipeline.recipes import load_recipe
from kvcq.spec.canonical import MAX_BYTES
from tests.attacks.hostile import copy, edit_header, relist
from tests.attacks.mutation import sealed
from tests.chain import bare_environment

SECONDS, MEGABYTES = 2.0, 300

CHILD = """
import json, re, sys, time
from pathlib import Path
from kvcq.artifacts.verify import verify
from kvcq.errors import KvcqError

for path in sys.argv[1:]:
    # The peak of this process since here: ru_maxrss would hold the parent's.
    Path("/proc/self/clear_refs").write_text("5")
    start = time.process_time()
    try:
        verify(Path(path))
        said = "accepted"
    except KvcqError as error:
        said = str(error)
    seconds = time.process_time() - start
    peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
    print(json.dumps({"said": said[:200], "seconds": seconds, "mb": int(peak) / 1024}))
"""

MB = 1 << 20
JSON = {
    "brackets": b"[" * (15 * MB),
    "empty lists": b"[" + b"[]," * (5 * MB) + b"[]]\n",
    "empty objects in the limit": b"[" + b"{}," * 130_000 + b"{}]\n",
    "whole numbers": b"[" + b"1," * (7 * MB) + b"1]\n",
    "numbers in the limit": b"[" + b"0.125," * 1_040_000 + b"1]\n",
    "fields in the limit": b"{" + b",".join(b'"%06x":{}' % i for i in range(130_000)) + b"}\n",
    "digits": b'{"a":' + b"9" * (15 * MB) + b"}\n",
    "a long text": b'"' + b"x" * (15 * MB) + b'"\n',
    "a long text of wide characters": b'"' + "𝟙".encode() * (15 * MB // 4) + b'"\n',
    "escapes": b'"' + b"\\u0041" * (2 * MB) + b'"\n',
    "a long name": b'{"' + b"k" * (15 * MB) + b'":1}\n',
    "more than allowed": b" " * (MAX_BYTES + 1),
}


def header_of(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


SCALAR = b'"t%06d":{"dtype":"F32","shape":[],"data_offsets":[%d,%d]}'
BIGGEST = b",".join([b"9007199254740991"] * 8)
TENSORS = {
    "a million tensors": b"{" + b",".join(SCALAR % (i, 4 * i, 4 * i + 4) for i in range(250_000)) + b"}",
    "tensors in the limit": b"{" + b",".join(SCALAR % (i, 4 * i, 4 * i + 4) for i in range(40_000)) + b"}",
    "a huge header": b"{" + b" " * (15 * MB) + b"}",
    "a huge shape": b'{"t":{"dtype":"F32","shape":[' + BIGGEST + b'],"data_offsets":[0,4]}}',
    "many dimensions": b'{"t":{"dtype":"F32","shape":[' + b"1," * 500_000 + b'1],"data_offsets":[0,4]}}',
    "deep": b'{"t":' + b"[" * (15 * MB),
}


def measure(paths: list[Path]) -> list[dict]:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process is read from /proc")
    command = [sys.executable, "-c", CHILD, *map(str, paths)]
    run = subprocess.run(command, env=bare_environment(), capture_output=True, text=True, check=True)
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_the_worst_headers_cost_little(chain, tmp_path):
    paths = []
    for number, text in enumerate(JSON.values()):
        folder = copy(chain, "bundle", tmp_path / f"{number}")
        (folder / "kvcq.json").write_bytes(text)
        paths.append(folder)
    for row, path in zip(measure(paths), paths, strict=True):
        assert row["said"].startswith(("unreadable", "altered", "kvcq.json has", "not a JSON")), (path, row)
        assert row["seconds"] < SECONDS and row["mb"] < MEGABYTES, (path, row)


def test_sealed_headers_in_the_limit_cost_little(chain, tmp_path):
    """The digest holds: schema and meaning are what must be frugal."""
    header = json.loads((chain["stats"] / "stats.json").read_bytes())
    layer, tensor = header["geometry"]["layers"][0], header["files"][0]
    run = {"format": "kvcq.run", "version": 1}
    many = {
        "stats": [
            {**header, "geometry": {**header["geometry"], "layers": [{**layer, "layer": i} for i in range(9000)]}},
            {**header, "sequences": ["0" * 64] * 100_000},
            {**header, "files": [tensor] * 30_000},
            {**header, "versions": {str(i): "x" for i in range(50_000)}},
        ],
        "report": [{**run, "info": {"x": [[]] * 50_000}}, {**run, "info": {"x": {str(i): 0 for i in range(50_000)}}}],
    }
    paths = []
    for kind, documents in many.items():
        for number, document in enumerate(documents):
            folder = copy(chain, kind, tmp_path / f"{number}")
            (folder / ("stats.json" if kind == "stats" else "run.json")).write_bytes(sealed(document))
            paths.append(folder)
    for row, path in zip(measure(paths), paths, strict=True):
        assert row["seconds"] < SECONDS and row["mb"] < MEGABYTES, (path, row)


def test_the_worst_tensor_headers_cost_little(chain, tmp_path):
    paths = []
    for number, text in enumerate(TENSORS.values()):
        folder = copy(chain, "stats", tmp_path / f"{number}")
        (folder / "samples.safetensors").write_bytes(header_of(text) + bytes(160_000))
        relist(folder, "stats")
        paths.append(folder)
    for row, path in zip(measure(paths), paths, strict=True):
        assert "safetensors" in row["said"] or "tensor" in row["said"] or "trailing" in row["said"], (path, row)
        assert row["seconds"] < SECONDS and row["mb"] < MEGABYTES, (path, row)


def test_a_bundle_larger_than_free_memory_is_refused_before_it_is_read(chain, tmp_path, monkeypatch):
    monkeypatch.setattr(integrity, "free_memory", lambda: 64 << 20)
    with (tmp_path / "x.kvcq").open("wb") as file:
        file.truncate(1 << 35)
    with pytest.raises(ResourceError, match=r"takes 32768 MiB of memory and 64 MiB are free") as caught:
        verify(tmp_path / "x.kvcq")
    assert caught.value.exit_code == 6


def test_free_memory_is_what_the_system_says():
    assert 1 << 20 < integrity.free_memory() < 1 << 46


def test_what_was_verified_does_not_change_with_the_files(chain, tmp_path, monkeypatch):
    """Also beyond the size from which statistics are mapped."""
    monkeypatch.setattr(integrity, "COPY_LIMIT", 16)
    for name in ("bundle", "archive"):
        path = copy(chain, name, tmp_path)
        bundle = open_bundle(path)
        before = {key: array.copy() for key, array in bundle.tensors.items()}
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            with file.open("r+b") as handle:
                handle.write(b"\xff" * file.stat().st_size)
        assert all((bundle.tensors[key] == array).all() for key, array in before.items())


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BOMB, "anchors and aliases"),
        ("method: oscar\nparams: &p {clip_k: *p}\n", "anchors and aliases"),
        ("method: oscar\nmethod: nova\n", "a key is repeated"),
        ("method: oscar\n" + "# padding\n" * 5000, "more than the"),
        ("method: !!python/object/apply:os.system [id]\n", "could not determine a constructor"),
        ("[" * 2000, "nested too deeply"),
    ],
)
def test_yaml_is_plain_or_refused(tmp_path, text, says):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    for load in (load_recipe, load_gates):
        with pytest.raises(InputError, match=says) as caught:
            load(path)
        assert len(str(caught.value)) < 400


def test_no_more_than_the_limit_is_read_of_an_endless_recipe():
    with pytest.raises(InputError, match="more than the"):
        load_recipe(Path("/dev/zero"))


def test_claims_of_a_manifest_are_compared_before_files_are_read(chain, tmp_path):
    folder = copy(chain, "fit", tmp_path)
    with (folder / "tensors.safetensors").open("r+b") as file:
        file.truncate(1 << 36)
    edit_header(folder, "fit", lambda header: header["files"][0].update(size=1 << 36))
    with pytest.raises(CorruptArtifactError, match="bytes of tensors"):
        verify(folder)
