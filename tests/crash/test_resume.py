"""A resumed collection is the uninterrupted one, byte for byte, and continues nothing else."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvcq.artifacts.checkpoint_file import checkpoint_path
from kvcq.artifacts.verify import verify
from kvcq.capture.collect import Capture
from kvcq.errors import CorruptArtifactError, InputError, Interrupted
from kvcq.pipeline.checkpoint import Checkpoint
from kvcq.pipeline.collect import collect
from kvcq.pipeline.fit import fit
from kvcq.pipeline.progress import SILENT
from kvcq.pipeline.requests import CollectRequest, FitRequest
from tests.chain import World, contents, write_text
from tests.tiny import save_tiny

ORIGINAL = Capture.run
CALM: dict[str, Any] = {"checkpoint_every": 3600.0}


class Lines:
    """A reporter that remembers notes and warnings."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def stage(self, text: str) -> None: ...
    def advance(self, done: int, total: int, unit: str) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)

    warn = note


def request(world: World, out: Path, **options: Any) -> CollectRequest:
    given: dict[str, Any] = {"num_tokens": 512, "seq_len": 64, "chunk": 32, "rows": 256, "query_rows": 64}
    given |= {"model": str(world.model), "data": (str(world.text),), "out": out}
    return CollectRequest(**given | options)


def interrupt(patch: pytest.MonkeyPatch, after: int, error: BaseException) -> None:
    """Let the capture raise in the middle of the sequence that follows `after` finished ones."""
    left = [after]

    def run(self: Capture, sequence: Any, chunk: int) -> None:
        if left[0] == 0:
            patch.setattr("kvcq.capture.collect.Capture._refuse_silent_layers", lambda *_: raise_(error))
        left[0] -= 1
        ORIGINAL(self, sequence, chunk)

    patch.setattr(Capture, "run", run)


def raise_(error: BaseException) -> None:
    raise error


def stopped(wanted: CollectRequest, after: int, error: BaseException | None = None) -> BaseException:
    with pytest.MonkeyPatch.context() as patch, pytest.raises((KeyboardInterrupt, Interrupted)) as caught:
        interrupt(patch, after, error or KeyboardInterrupt())
        collect(wanted)
    return caught.value


@pytest.fixture(scope="module")
def whole(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("whole") / "stats"
    collect(request(world, out))
    return contents(out)


@pytest.mark.parametrize("every", [0.0, 3600.0], ids=["each sequence", "at the interruption"])
def test_resuming_after_any_sequence_gives_the_same_bytes(
    world: World, tmp_path: Path, whole: dict[str, str], every: float
) -> None:
    out = tmp_path / "stats"
    for after in range(1, 8):
        note = stopped(request(world, out, checkpoint_every=every), after).__notes__
        assert ["--resume" in line for line in note] == [True] and not out.exists()
        lines = Lines()
        collect(request(world, out, checkpoint_every=every, resume=True), lines)
        assert any(line.startswith(f"resuming after {64 * after} of 512") for line in lines.notes)
        assert contents(out) == whole and list(tmp_path.iterdir()) == [out]
        shutil.rmtree(out)


def test_a_run_may_be_interrupted_again_and_again(world: World, tmp_path: Path, whole: dict[str, str]) -> None:
    out = tmp_path / "stats"
    stopped(request(world, out), 2, Interrupted(15))
    stopped(request(world, out, resume=True), 0)
    stopped(request(world, out, resume=True), 3, Interrupted(2))
    collect(request(world, out, resume=True))
    assert contents(out) == whole


@pytest.mark.parametrize(("model_type", "dtype"), [("gemma2", "bfloat16"), ("qwen3_next", "float32")])
def test_other_architectures_and_half_precision_resume(
    tmp_path: Path, world: World, model_type: str, dtype: str
) -> None:
    """Layers that are not collected, bfloat16 rows, and a probe split off every sequence."""
    model = save_tiny(tmp_path / "model", model_type)
    options: dict[str, Any] = {"model": str(model), "dtype": dtype, "num_tokens": 320, "packing": "isolate"}
    collect(request(world, tmp_path / "whole", **options))
    stopped(request(world, tmp_path / "stats", **options), 3)
    collect(request(world, tmp_path / "stats", resume=True, **options))
    assert contents(tmp_path / "stats") == contents(tmp_path / "whole")


def test_an_interruption_before_the_first_sequence_leaves_nothing(world: World, tmp_path: Path) -> None:
    error = stopped(request(world, tmp_path / "deep" / "stats"), 0)
    assert not hasattr(error, "__notes__") and not list(tmp_path.iterdir())


def test_no_checkpoint_is_kept_where_none_is_wanted(world: World, tmp_path: Path) -> None:
    error = stopped(request(world, tmp_path / "stats", checkpoint_every=None), 3)
    assert not hasattr(error, "__notes__") and not list(tmp_path.iterdir())


def test_an_interruption_while_layers_take_a_sequence_in_keeps_the_older_state(
    world: World, tmp_path: Path, whole: dict[str, str]
) -> None:
    from kvcq.stats.accumulator import LayerSums

    out, finish, calls = tmp_path / "stats", LayerSums.finish, [0]

    def broken(self: LayerSums) -> None:
        calls[0] += 1
        if calls[0] == 4 * 3 + 3:  # the third layer of the fourth sequence
            raise KeyboardInterrupt
        finish(self)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LayerSums, "finish", broken)
        collect(request(world, out, checkpoint_every=0))
    header = json.loads((checkpoint_path(out) / "checkpoint.json").read_text())
    assert len(header["sequences"]) + len(header["probe"]) == 3
    collect(request(world, out, resume=True))
    assert contents(out) == whole


def test_resume_without_a_checkpoint_starts_from_the_beginning(
    world: World, tmp_path: Path, whole: dict[str, str]
) -> None:
    lines = Lines()
    collect(request(world, tmp_path / "stats", resume=True), lines)
    assert any("from the beginning" in line for line in lines.notes)
    assert contents(tmp_path / "stats") == whole


def test_a_checkpoint_is_neither_overlooked_nor_overwritten(
    world: World, tmp_path: Path, whole: dict[str, str]
) -> None:
    out = tmp_path / "stats"
    stopped(request(world, out), 2)
    kept = contents(tmp_path / ".stats.checkpoint")
    for dry_run in (False, True):
        with pytest.raises(InputError, match=r"\.stats\.checkpoint.*--resume.*--force"):
            collect(request(world, out, dry_run=dry_run))
    collect(request(world, out, dry_run=True, force=True))
    collect(request(world, out, dry_run=True, resume=True))
    assert contents(tmp_path / ".stats.checkpoint") == kept
    collect(request(world, out, force=True))
    assert contents(out) == whole and list(tmp_path.iterdir()) == [out]


def test_force_never_discards_what_is_no_checkpoint(world: World, tmp_path: Path) -> None:
    (tmp_path / ".stats.checkpoint").mkdir()
    (tmp_path / ".stats.checkpoint" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="not a kvcq artifact"):
        collect(request(world, tmp_path / "stats", force=True))
    assert (tmp_path / ".stats.checkpoint" / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"chunk": 64}, "chunk 32, not 64"),
        ({"seq_len": 128}, "data.seq_len 64, not 128"),
        ({"rows": 300}, "rows 256, not 300"),
        ({"seed": 1}, "seed 0, not 1"),
        ({"dtype": "bfloat16"}, "dtype float32, not bfloat16"),
        ({"packing": "off"}, "data.packing on, not off"),
        ({"num_tokens": 640}, "data.wanted_tokens 512, not 640"),
        ({"shard": (0, 2)}, "shard"),
        ({"data": "other text"}, "data.sha256"),
        ({"model": "other weights"}, "provenance.weights"),
        ({"model": "other model"}, "geometry.hidden_size 64, not 128"),
        ({"versions": "torch"}, "versions.torch"),
        ({"device": "NVIDIA"}, "device cpu, not NVIDIA"),
    ],
    ids=lambda value: "-".join(map(str, *value.items())) if isinstance(value, dict) else "",
)
def test_another_collection_is_not_continued(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], named: str
) -> None:
    stopped(request(world, tmp_path / "stats"), 1)
    change = dict(change)
    if change.get("data"):
        (tmp_path / "x").mkdir()
        change["data"] = (str(write_text(tmp_path / "x" / "calibration.txt", 5)),)
    if model := change.get("model"):
        name = {"hidden_size": 128} if model == "other model" else {"tie_word_embeddings": True}
        change["model"] = str(save_tiny(tmp_path / "y" / "model", "llama", **name))
    if change.pop("versions", None):
        monkeypatch.setattr("kvcq.pipeline.collect.versions", lambda: {"kvcq": "0.1.0", "torch": "9"})
    if device := change.pop("device", None):
        monkeypatch.setattr("kvcq.pipeline.collect.hardware", lambda _: device)
    kept = contents(tmp_path / ".stats.checkpoint")
    with pytest.raises(InputError, match="of another collection") as caught:
        collect(request(world, tmp_path / "stats", resume=True, **change))
    assert named in str(caught.value) or "more" in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value) and "--force" in str(caught.value)
    assert contents(tmp_path / ".stats.checkpoint") == kept and not (tmp_path / "stats").exists()


def test_a_damaged_checkpoint_is_refused_and_no_step_takes_it_for_statistics(world: World, tmp_path: Path) -> None:
    out, path = tmp_path / "stats", tmp_path / ".stats.checkpoint"
    stopped(request(world, out), 2)
    with pytest.raises(CorruptArtifactError, match=r"stats\.json is missing"):
        fit(FitRequest(stats=path, out=tmp_path / "fit", method="oscar"))
    with pytest.raises(CorruptArtifactError, match="incomplete stats"):
        verify(path)
    for name in ("moments.safetensors", "samples.safetensors", "checkpoint.json"):
        data = (path / name).read_bytes()
        (path / name).write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
        with pytest.raises(CorruptArtifactError, match=r"--force"):
            collect(request(world, out, resume=True))
        (path / name).write_bytes(data)
    collect(request(world, out, resume=True))


def test_checkpoints_cost_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one part in twenty, however slow the disk and however short the interval."""
    now = [0.0]
    monkeypatch.setattr("kvcq.pipeline.checkpoint.time.monotonic", lambda: now[0])
    monkeypatch.setattr("kvcq.pipeline.checkpoint.write_checkpoint", lambda *_: now.__setitem__(0, now[0] + 6.0))

    class Stub:
        done: frozenset[str] = frozenset()
        result = type("Part", (), {"sequences": (), "probe": (), "moments": {}, "samples": {}})

    checkpoint = Checkpoint(tmp_path / "stats", 60.0, SILENT)
    checkpoint._header = type("Header", (), {"model_copy": lambda *_, **__: None})()  # type: ignore[assignment]
    spent = 0.0
    while now[0] < 10000.0:
        now[0] += 1.0
        if checkpoint.due:
            checkpoint.save(Stub())  # type: ignore[arg-type]
            spent += 6.0
    assert 0.03 < spent / now[0] < 0.06


def test_the_request_says_how_long_the_pauses_are() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(CollectRequest)}
    assert fields["checkpoint_every"] == 300.0 and fields["resume"] is False
    assert re.search(r"Seconds between checkpoints", CollectRequest.__doc__ or "")
