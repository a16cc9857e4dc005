"""What does not belong together is refused, and a failure leaves nothing half-written behind."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvcq.artifacts.verify import verify
from kvcq.errors import CorruptArtifactError, EvaluationError, InputError, KvcqError, MismatchError
from kvcq.methods.nova import Nova
from kvcq.pipeline import subjects
from kvcq.pipeline import validate as validate_module
from kvcq.pipeline.fit import fit
from kvcq.pipeline.pack import pack
from kvcq.pipeline.progress import SILENT
from kvcq.pipeline.requests import FitRequest, PackRequest
from kvcq.runtime import compat
from kvcq.spec.identity import Provenance
from tests.attacks.hostile import edit_header
from tests.chain import World, contents
from tests.pipeline.test_fit_options import Listener
from tests.tiny import save_tiny, tiny_model


def rebuilt(source: Path, target: Path, dtype: torch.dtype) -> Path:
    """Copy a model folder with its weights in another dtype."""
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    kept = {name: tensor.to(dtype) for name, tensor in weights.items()}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_gates_are_recorded_and_a_failed_one_is_named(world: World, tmp_path: Path) -> None:
    gates = tmp_path / "gates.yaml"
    gates.write_text("gates: [{metric: kl, max: 10}, {metric: top1, context: 96, min: 1.5, artifacts: [nova]}]")
    result = world.validate(tmp_path / "report", world.fits["nova"], world.fits["oscar"], gates=gates, canary=())
    assert [(gate.artifact, gate.metric, gate.passed) for gate in result.report.gates] == [
        ("nova", "kl", True),
        ("oscar", "kl", True),
        ("nova", "top1", False),
    ]
    assert result.failed_gates[0].startswith("nova: top1") and len(result.failed_gates) == 1
    assert verify(tmp_path / "report").kind == "report"


def test_a_bundle_carries_its_failed_gates_and_pack_says_so(world: World, tmp_path: Path) -> None:
    (tmp_path / "gates.yaml").write_text("gates: [{metric: kl, max: 0.0}]")
    world.validate(tmp_path / "report", world.fits["nova"], gates=tmp_path / "gates.yaml")
    listener = Listener()
    request = PackRequest(fit=world.fits["nova"], report=tmp_path / "report", out=tmp_path / "it.kvcq")
    assert not pack(request, listener).manifest.validation.gates[0].passed
    assert "gate failed" in listener.warnings[0]


@pytest.mark.parametrize("text", ["gates: []", "gates: [{metric: kl}]", "gates: [{metric: kll, max: 1}]", "\tx", "3"])
def test_bad_gates_are_refused_before_the_model_is_loaded(
    world: World, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validate_module, "open_model", lambda *_: pytest.fail("the model was loaded first"))
    (tmp_path / "gates.yaml").write_text(text)
    with pytest.raises(InputError):
        world.validate(tmp_path / "report", world.fits["nova"], gates=tmp_path / "gates.yaml")


@pytest.mark.parametrize(
    ("overrides", "field"),
    [({"head_dim": 16}, "geometry"), ({"rms_norm_eps": 1e-3}, "norms"), ({"rope_theta": 5e4}, "geometry")],
)
def test_a_model_of_another_identity_is_refused(
    world: World, tmp_path: Path, overrides: dict[str, float], field: str
) -> None:
    other = save_tiny(tmp_path / "other", **overrides)
    with pytest.raises(MismatchError, match=f"{field}.* differ") as caught:
        world.validate(tmp_path / "report", world.fits["nova"], model=str(other))
    assert caught.value.exit_code == 5 and not (tmp_path / "report").exists()


def test_a_model_with_another_vocabulary_is_refused(world: World, tmp_path: Path) -> None:
    other = shutil.copytree(world.model, tmp_path / "other")
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"Q"', '"§"'))
    with pytest.raises(MismatchError, match="vocabulary differ"):
        world.validate(tmp_path / "report", world.fits["nova"], model=str(other))


def test_other_weights_warn_and_strict_refuses(world: World, tmp_path: Path) -> None:
    other = rebuilt(world.model, tmp_path / "other", torch.float16)
    with pytest.raises(MismatchError, match="other weights") as caught:
        world.validate(tmp_path / "report", world.fits["nova"], model=str(other), strict=True)
    assert caught.value.where == "--strict" and not (tmp_path / "report").exists()
    listener = Listener()
    request = replace(
        validate_module.ValidateRequest(
            artifacts=(world.fits["nova"],), model=str(other), data=(str(world.held_out),), out=tmp_path / "report"
        ),
        contexts=(96,),
        canary=(),
    )
    assert validate_module.validate(request, listener).path is not None
    assert any("other weights" in line for line in listener.warnings)


def test_equal_shapes_are_not_equal_weights_and_report_and_pack_say_so(world: World, tmp_path: Path) -> None:
    """Another seed gives weight files of the same sizes and headers."""
    other = save_tiny(tmp_path / "other", seed=5)
    report = tmp_path / "report"
    row = world.validate(report, world.fits["nova"], model=str(other)).report.artifacts[1]
    assert any("fitted on other weights" in line for line in row.warnings)
    listener = Listener()
    pack(PackRequest(fit=world.fits["nova"], report=report, out=tmp_path / "nova.kvcq"), listener)
    assert any("other weights" in line for line in listener.warnings)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda g: g["ropes"][0].update(sense=-1), "rope.sense is -1, the model has 1"),
        (lambda g: g["ropes"][0].update(pairing="interleaved"), "rope.pairing is interleaved"),
        (lambda g: g["ropes"][0]["inv_freq"].reverse(), "rope.inv_freq"),
        (lambda g: g["layers"][2].update(rope=None), "rope is True"),
        (lambda g: g["layers"][1].update(q_heads=2), "q_heads is 2, the model has 4"),
    ],
)
def test_an_artifact_in_another_frame_is_refused(world: World, tmp_path: Path, change, says: str) -> None:
    """Sealed by hand with the identity of the right model: what is measured is what counts."""
    fit = shutil.copytree(world.fits["oscar"], tmp_path / "forged")
    edit_header(fit, "fit", lambda header: change(header["geometry"]))
    verify(fit)
    with pytest.raises(MismatchError, match=says) as caught:
        world.validate(tmp_path / "report", fit)
    assert caught.value.exit_code == 5 and "forged, layer" in str(caught.value)


def test_a_copy_of_the_same_files_is_the_same_model(world: World, tmp_path: Path) -> None:
    copied = shutil.copytree(world.model, tmp_path / "renamed")
    world.validate(tmp_path / "report", world.fits["nova"], model=str(copied), strict=True, canary=())


def test_another_revision_of_the_hub_counts_as_another_origin() -> None:
    first = Provenance(source="org/name", revision="a" * 40)
    assert compat._other_origin(first, first, False) is None
    assert compat._other_origin(first, Provenance(source="folder"), False) is None
    other = Provenance(source="org/name", revision="b" * 40)
    assert "revision" in str(compat._other_origin(first, other, False))


def test_pack_refuses_a_report_that_measured_something_else(world: World, tmp_path: Path) -> None:
    world.fit(tmp_path / "other", "nova", "seed=9")
    with pytest.raises(MismatchError, match="does not cover this fit"):
        pack(PackRequest(fit=tmp_path / "other", report=world.report, out=tmp_path / "it.kvcq"))
    assert not (tmp_path / "it.kvcq").exists()


@pytest.mark.parametrize("setting", ["clip_k=0.9", "groups=4", "skip_layers=1", "windows.recent=9"])
def test_pack_tells_fits_apart_that_share_every_tensor(world: World, tmp_path: Path, setting: str) -> None:
    """naive-int2 stores no tensors: all its fits have one tensors digest, and still are different things."""
    world.fit(tmp_path / "other", "naive-int2", setting)
    with pytest.raises(MismatchError, match="does not cover this fit"):
        pack(PackRequest(fit=tmp_path / "other", report=world.report, out=tmp_path / "it.kvcq"))
    result = world.validate(tmp_path / "report", world.fits["naive-int2"], tmp_path / "other")
    packed = pack(PackRequest(fit=tmp_path / "other", report=tmp_path / "report", out=tmp_path / "it.kvcq"))
    row = result.report.artifacts[2]
    assert row.name == "other" and packed.manifest.bits == row.storage
    assert packed.manifest.validation.contexts == row.contexts
    verify(tmp_path / "it.kvcq")


def test_pack_refuses_a_report_without_canary_and_a_wrong_name(world: World, tmp_path: Path) -> None:
    world.validate(tmp_path / "report", world.fits["nova"], canary=())
    with pytest.raises(InputError, match="canary"):
        pack(PackRequest(fit=world.fits["nova"], report=tmp_path / "report", out=tmp_path / "it.kvcq"))
    with pytest.raises(InputError, match=r"does not end in \.kvcq"):
        world.pack("nova", tmp_path / "it")


def test_a_damaged_input_is_refused_by_every_step(world: World, tmp_path: Path) -> None:
    stats = shutil.copytree(world.stats, tmp_path / "stats")
    with (stats / "moments.safetensors").open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CorruptArtifactError):
        replace(world, folder=tmp_path).fit(tmp_path / "fit", "oscar")
    fit = shutil.copytree(world.fits["oscar"], tmp_path / "oscar")
    (fit / "tensors.safetensors").write_bytes(b"")
    with pytest.raises(CorruptArtifactError):
        world.validate(tmp_path / "report", fit)
    with pytest.raises(InputError, match="neither a fit nor a bundle"):
        world.validate(tmp_path / "report", world.stats)
    assert {path.name for path in tmp_path.iterdir()} == {"stats", "oscar"}


def test_contexts_must_exceed_the_windows_and_stay_in_the_model(world: World, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing was quantized"):
        world.validate(tmp_path / "report", world.fits["nova"], contexts=(64, 128))
    with pytest.raises(InputError, match="context is 512 tokens"):
        world.validate(tmp_path / "report", world.fits["nova"], contexts=(513,))
    with pytest.raises(InputError, match="context is 512 tokens"):
        world.collect(tmp_path / "stats", seq_len=1024)
    with pytest.raises(InputError, match="0 of 1 passages"):
        (tmp_path / "short.txt").write_text("the sand and the stone " * 3)
        world.validate(tmp_path / "report", world.fits["nova"], data=(str(tmp_path / "short.txt"),))


def test_windows_that_leave_no_room_for_the_canary_are_refused_before_measuring(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.fit(tmp_path / "wide", "naive-int2", "windows.sink=100", "windows.recent=300")
    with pytest.raises(InputError, match="canary of wide takes 592 tokens") as caught:
        world.validate(tmp_path / "report", tmp_path / "wide", contexts=(500,))
    assert "smaller windows" in str(caught.value)
    world.validate(tmp_path / "report", tmp_path / "wide", contexts=(500,), canary=())


def test_too_little_text_is_refused_and_little_text_warns(world: World, tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("the sand and the stone " * 3)
    with pytest.raises(InputError, match="tokens are too few"):
        world.collect(tmp_path / "stats", data=(str(tmp_path / "few.txt"),))
    (tmp_path / "some.txt").write_text("the sand and the stone of an island " * 20)
    world.collect(tmp_path / "stats", data=(str(tmp_path / "some.txt"),))
    header = validate_header(tmp_path / "stats")
    assert any("rough" in line for line in header.warnings) and header.data.got_tokens < header.data.wanted_tokens


def validate_header(path: Path):
    from kvcq.artifacts.stats_file import read_stats

    return read_stats(path).header


def test_a_model_that_computes_nan_gives_no_artifact(world: World, tmp_path: Path) -> None:
    model = tiny_model()
    model.model.layers[1].self_attn.v_proj.weight[3, 3] = torch.nan
    model.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(world.model / name, tmp_path / "model" / name)
    with pytest.raises(KvcqError) as caught:
        world.collect(tmp_path / "stats", model=str(tmp_path / "model"))
    assert "nan" in str(caught.value).lower() or "finite" in str(caught.value)
    with pytest.raises(KvcqError):
        world.validate(tmp_path / "report", world.fits["nova"], model=str(tmp_path / "model"))
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, EvaluationError("boom")], ids=repr)
def test_an_interrupted_fit_leaves_the_old_one_and_nothing_else(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    world.fit(tmp_path / "fit", "nova")
    before = contents(tmp_path)
    calls = []

    def interrupted(*_: object) -> None:
        calls.append(1)
        raise error

    monkeypatch.setattr(Nova, "fit_layer", interrupted)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        world.fit(tmp_path / "fit", "nova", "seed=3", force=True)
    assert calls and contents(tmp_path) == before
    with pytest.raises(InputError, match="output exists"):
        world.fit(tmp_path / "fit", "nova")
    assert len(calls) == 1


def test_force_replaces_artifacts_and_nothing_else(world: World, tmp_path: Path) -> None:
    first = contents(world.fit(tmp_path / "fit", "naive-int2"))
    assert contents(world.fit(tmp_path / "fit", "oscar", force=True)) != first
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="not a kvcq artifact"):
        world.fit(tmp_path / "precious", "oscar", force=True)
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "years of work"


def test_names_of_artifacts_never_collide(world: World, tmp_path: Path) -> None:
    paths = []
    for name in ("a/fit-3", "b/fit", "c/fit"):
        paths.append(shutil.copytree(world.fits["naive-int2"], tmp_path / name))
    paths.append(shutil.copytree(world.fits["oscar"], tmp_path / "d/fit"))
    names = [subject.name for subject in subjects.open_subjects(paths)]
    assert names == ["fit-3", "fit", "fit-2", "fit-4"]


def test_no_artifact_is_refused() -> None:
    with pytest.raises(InputError, match="no artifact"):
        subjects.open_subjects([])
    SILENT.stage("silence is a reporter too")


def test_an_output_never_replaces_an_input_or_another_kind(world: World, tmp_path: Path) -> None:
    stats = shutil.copytree(world.stats, tmp_path / "stats")
    before = contents(stats)
    for out in (stats, stats / "inside"):
        with pytest.raises(InputError, match="would replace the input"):
            fit(FitRequest(stats=stats, out=out, method="naive-int2", force=True))
    with pytest.raises(InputError, match="holds stats, not fit"):
        world.fit(stats, "naive-int2", force=True)
    assert contents(stats) == before


def test_another_kind_of_folder_is_named(world: World, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="this is a fit folder, not stats"):
        fit(FitRequest(stats=world.fits["nova"], out=tmp_path / "fit", method="oscar"))
    with pytest.raises(InputError, match="this is a report folder, not fit"):
        pack(PackRequest(fit=world.report, report=world.report, out=tmp_path / "it.kvcq"))


def test_requests_take_strings_for_paths(tmp_path: Path) -> None:
    request = validate_module.ValidateRequest(artifacts=("a", "b"), model="m", data=("d",), out="report")  # type: ignore[arg-type]
    assert request.artifacts == (Path("a"), Path("b")) and request.out == Path("report")
    assert request.data == ("d",) and request.gates is None


@pytest.mark.parametrize("gate", ["{metric: kl, context: 4096, max: 1}", "{metric: kl, max: 1, artifacts: [zz]}"])
def test_gates_that_cannot_be_judged_are_refused_in_a_dry_run(world: World, tmp_path: Path, gate: str) -> None:
    gates = tmp_path / "gates.yaml"
    gates.write_text(f"gates: [{gate}]")
    with pytest.raises(InputError, match="the gate on kl"):
        world.validate(tmp_path / "report", world.fits["nova"], gates=gates, dry_run=True)


def test_a_target_beyond_the_model_and_few_rows_are_told(world: World, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="beyond the model's 512 positions"):
        world.fit(tmp_path / "fit", "oscar", target_context=513)
    listener = Listener()
    fit(FitRequest(stats=world.stats, out=tmp_path / "fit", method="nova", settings=("iterations=1",)), listener)
    assert any("sampled rows stand behind 256 words" in line for line in listener.warnings)
