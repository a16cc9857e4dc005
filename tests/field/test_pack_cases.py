"""What went wrong in the field with artifact files, kind by kind, and the test that keeps it out.

| kind | tests |
|---|---|
| truncated, empty, a Git LFS pointer, trailing bytes | test_a_damaged_file_is_one_line_with_the_way_out |
| written over what was read | test_packing_over_its_own_source_is_safe, test_a_second_pack_needs_force_and_repeats |
| dtypes, views and shared storage in safetensors | test_every_dtype_and_view_comes_back |
| the disk fills | test_a_full_disk_leaves_nothing_that_looks_valid, test_a_folder_without_its_manifest_is_incomplete |
| pickles | test_no_pickle_ever_runs |
| tensors under names that nobody looks up | test_every_tensor_is_expected_and_every_expected_one_is_there |
| another format version | test_another_version_names_the_release_that_reads_it |
| biases beside a folded value rotation | test_biases_leave_the_fold_exact, test_folding_the_weight_without_its_bias_would_be_wrong |
| gates, norms and experts before the output projection | test_folds_are_decided_by_running_them, test_experts_in_the_projection_are_refused |
"""  # noqa: E501

from __future__ import annotations

import errno
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvcq.artifacts.store import Staging
from kvcq.artifacts.tensor_file import parse_tensors, read_tensors
from kvcq.artifacts.tensors import tensor_chunks
from kvcq.artifacts.verify import verify
from kvcq.cli.main import execute
from kvcq.errors import CorruptArtifactError
from kvcq.models.attention import attention_hook, plain_attention
from kvcq.models.folding import FOLDS, fold_output
from kvcq.models.library import forward
from tests.attacks.hostile import edit_header, relist, replace_tensors
from tests.chain import World, contents, llama_world, make_world
from tests.tiny import MOE, save_tiny, tiny_model, tiny_tokens


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return llama_world(tmp_path_factory.getbasetemp())


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command line that must fail with a code, and return its one line."""

    def call(code: int, *arguments: object) -> str:
        capsys.readouterr()
        assert execute([str(argument) for argument in arguments]) == code
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1
        return err

    return call


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
DAMAGES = {
    "cut at 20": (lambda data: data[:20], "truncated"),
    "short by 8": (lambda data: data[:-8], "truncated"),
    "empty": (lambda _: b"", "truncated"),
    "pointer": (lambda _: POINTER, "git lfs pull"),
    "two more": (lambda data: data + b"ab", "too long"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_line_with_the_way_out(world: World, tmp_path: Path, refused, damage: str) -> None:
    change, says = DAMAGES[damage]
    bundle = shutil.copytree(world.folder / "nova.kvcq", tmp_path / "nova.kvcq")
    path = bundle / "kvcq.safetensors"
    path.write_bytes(change(path.read_bytes()))
    line = refused(4, "verify", bundle)
    assert "kvcq.safetensors" in line and says in line
    assert "copy or download it again" in line or "git lfs pull" in line
    loose = tmp_path / "loose.safetensors"
    loose.write_bytes(change((world.folder / "nova.kvcq" / "kvcq.safetensors").read_bytes()))
    with pytest.raises(CorruptArtifactError, match=r"truncated|trailing bytes|git lfs pull"):
        read_tensors(loose)


def test_packing_over_its_own_source_is_safe(world: World, tmp_path: Path, refused) -> None:
    """The output is the folder that the fit is read from: refused, with --force too."""
    source = shutil.copytree(world.fits["nova"], tmp_path / "same.kvcq")
    before = contents(source)
    refused(2, "pack", source, "--report", world.report, "--out", source, "-q")
    refused(2, "pack", source, "--report", world.report, "--out", source, "--force", "-q")
    assert contents(source) == before


@pytest.mark.parametrize("archive", [False, True])
def test_a_second_pack_needs_force_and_repeats(world: World, tmp_path: Path, refused, archive: bool) -> None:
    out = world.pack("nova", tmp_path / "it.kvcq", archive=archive)
    before = contents(out)
    assert "--force" in refused(2, "pack", world.fits["nova"], "--report", world.report, "--out", out, "-q")
    world.pack("nova", out, archive=archive, force=True)
    assert contents(out) == before and [path.name for path in tmp_path.iterdir()] == ["it.kvcq"]


def test_every_dtype_and_view_comes_back() -> None:
    base = torch.arange(-12, 12).reshape(4, 6)
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int32, torch.int64)
    tensors = {f"t.{str(dtype).removeprefix('torch.')}": base.to(dtype) for dtype in dtypes}
    tensors |= {"t.uint8": base.abs().to(torch.uint8), "t.bool": base > 0, "t.empty": torch.empty(0, 3)}
    shared = torch.randn(8, 4)
    tensors |= {"v.transposed": shared.mT, "v.slice": shared[::2], "v.same": shared, "v.scalar": torch.tensor(3.5)}
    tensors |= {"n.fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "n.big_endian": np.arange(3, dtype=">f4")}
    data = b"".join(bytes(chunk) for chunk in tensor_chunks(tensors))
    found = parse_tensors(memoryview(bytearray(data)), "memory").torch_tensors()
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        if isinstance(tensor, np.ndarray):
            tensor = torch.from_numpy(tensor.astype(tensor.dtype.newbyteorder("=")))
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
        assert found[name].is_contiguous()
    assert b"__metadata__" not in data
    from safetensors.torch import load

    theirs = load(data)
    assert all(torch.equal(theirs[name], found[name]) for name in found)


@pytest.mark.parametrize("step", range(5))
def test_a_full_disk_leaves_nothing_that_looks_valid(
    world: World, tmp_path: Path, refused, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The disk fills at each of the five files, the manifest last."""
    written: list[str] = []
    real = Staging.stream

    def stream(self: Staging, name: str, chunks: object) -> tuple[int, str]:
        if len(written) == step:
            (self.folder / name).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(name)
        return real(self, name, chunks)  # type: ignore[arg-type]

    monkeypatch.setattr(Staging, "stream", stream)
    line = refused(6, "pack", world.fits["nova"], "--report", world.report, "--out", tmp_path / "it.kvcq", "-q")
    assert "No space left on device" in line and not list(tmp_path.iterdir())
    assert "kvcq.json" not in written


def test_a_folder_without_its_manifest_is_incomplete(world: World, tmp_path: Path, refused) -> None:
    for source, manifest in (
        (world.folder / "nova.kvcq", "kvcq.json"),
        (world.fits["nova"], "fit.json"),
        (world.stats, "stats.json"),
    ):
        folder = shutil.copytree(source, tmp_path / manifest)
        (folder / manifest).unlink()
        for verb in ("verify", "inspect"):
            assert f"{manifest} is missing" in refused(4, verb, folder)
    packed = ("--report", world.report, "--out", tmp_path / "x.kvcq", "-q")
    assert "fit.json is missing" in refused(4, "pack", tmp_path / "fit.json", *packed)


class SideEffect:
    """Unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (Path.touch, (self.path,))


def test_no_pickle_ever_runs(world: World, tmp_path: Path, capsys) -> None:
    mark = tmp_path / "owned"
    data = pickle.dumps(SideEffect(mark))
    pickle.loads(data)  # noqa: S301 - the fixture works
    assert mark.exists()
    mark.unlink()
    evil = tmp_path / "rotation.pt"
    evil.write_bytes(data)
    torch.save({"r": SideEffect(mark)}, tmp_path / "zip.pt")
    model = shutil.copytree(world.model, tmp_path / "model")
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(data)
    folders = {}
    for kind, source in {"stats": world.stats, "fit": world.fits["nova"], "bundle": world.folder / "nova.kvcq"}.items():
        folders[kind] = shutil.copytree(source, tmp_path / kind)
        for path in list(folders[kind].glob("*.safetensors")):
            path.write_bytes(data)
        relist(folders[kind], kind)
    fit = ["--out", tmp_path / "out", "-q"]
    tries = [
        *(["verify", path] for path in (evil, tmp_path / "zip.pt", *folders.values())),
        *(["inspect", path] for path in (evil, *folders.values())),
        ["fit", folders["stats"], "--method", "oscar", *fit],
        ["fit", world.stats, "--recipe", evil, *fit],
        ["validate", folders["fit"], "--model", world.model, "--data", world.held_out, *fit],
        ["validate", world.fits["nova"], "--gates", evil, "--model", world.model, "--data", world.held_out, *fit],
        ["validate", world.fits["nova"], "--model", model, "--data", world.held_out, *fit],
        ["collect", model, "--data", world.text, *fit],
        ["collect", world.model, "--data", evil, *fit],
        ["pack", folders["fit"], "--report", world.report, "--out", tmp_path / "x.kvcq", "-q"],
    ]
    for arguments in tries:
        assert execute([str(argument) for argument in arguments]) in (2, 4), arguments
        assert not mark.exists(), arguments


def test_every_tensor_is_expected_and_every_expected_one_is_there(world: World, tmp_path: Path, refused) -> None:
    """Not a warning and a scale of one: a renamed, missing or added tensor stops every step, sealed or not."""
    name = "layers.1.k.codebook_scale"
    for number, change in enumerate(
        (
            lambda tensors: tensors.update({"layers.1.k.scale": tensors.pop(name)}),
            lambda tensors: tensors.pop(name),
            lambda tensors: tensors.update({"layers.1.k.codebook_scales": tensors[name]}),
        )
    ):
        fit = shutil.copytree(world.fits["nova"], tmp_path / str(number))
        tensors = read_tensors(fit / "tensors.safetensors")
        change(tensors)
        replace_tensors(fit, tensors)
        for arguments in (
            ("verify", fit),
            ("pack", fit, "--report", world.report, "--out", tmp_path / "x.kvcq", "-q"),
            ("validate", fit, "--model", world.model, "--data", world.held_out, "--out", tmp_path / "r", "-q"),
        ):
            line = refused(4, *arguments)
            assert "layers.1.k." in line and ("is missing" in line or "not called for" in line)


@pytest.mark.parametrize("version", [0, 2, 999])
def test_another_version_names_the_release_that_reads_it(world: World, tmp_path: Path, refused, version: int) -> None:
    bundle = shutil.copytree(world.folder / "nova.kvcq", tmp_path / "it.kvcq")
    edit_header(bundle, "bundle", lambda header: header.update(version=version, surprise={"new": 1}))
    for verb in ("verify", "inspect"):
        line = refused(5, verb, bundle)
        assert f"format version {version}" in line and "install kvcq" in line


@pytest.mark.parametrize("model_type", ["qwen2", "starcoder2", "gpt_oss"])
def test_biases_leave_the_fold_exact(tmp_path: Path, model_type: str) -> None:
    made = make_world(tmp_path / model_type, ("oscar",), model_type=model_type, collecting={"num_tokens": 768})
    row = made.validate(tmp_path / "report", made.fits["oscar"], canary=()).report.artifacts[1]
    assert row.folds and all(fold.fold and fold.error < 1e-5 for fold in row.folds)


def test_folding_the_weight_without_its_bias_would_be_wrong() -> None:
    """The other way to fold, into W_v, must take the bias along; the output bias stays untouched in both."""
    tokens = tiny_tokens(32)[None]
    rotation = torch.linalg.qr(torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(3))).Q
    whole = torch.block_diag(*rotation)
    errors = {}
    for with_bias in (True, False):
        model = tiny_model("qwen2")
        plain = forward(model, tokens)
        for layer in model.model.layers:
            own = layer.self_attn
            own.v_proj.weight.copy_(whole.mT @ own.v_proj.weight)
            if with_bias:
                own.v_proj.bias.copy_(own.v_proj.bias @ whole)
            own.o_proj.weight.copy_(fold_output(own.o_proj.weight, rotation, 4))
        errors[with_bias] = float((forward(model, tokens) - plain).norm() / plain.norm())
    assert errors[True] < 1e-5 < 0.1 < errors[False]


GATED = {
    "qwen3_next": ({}, False),
    "afmoe": (MOE, False),
    "bitnet": ({}, False),
    "laguna, per head": (MOE | {"gating": True}, True),
    "laguna, per element": (MOE | {"gating": "per-element"}, False),
}


@pytest.mark.parametrize("case", GATED)
def test_folds_are_decided_by_running_them(tmp_path: Path, case: str) -> None:
    """A gate of every channel or a norm in between forbids the fold; a gate of every head does not."""
    options, folds = GATED[case]
    model_type = case.split(",")[0]
    tiny_model(model_type, **options)  # skips where the library has no such model
    made = make_world(tmp_path / "made", ("oscar",), model_type=model_type, collecting={"num_tokens": 768}, **options)
    row = made.validate(tmp_path / "report", made.fits["oscar"]).report.artifacts[1]
    assert row.folds and {fold.layer for fold in row.folds} == set(row.quantized_layers)
    for fold in row.folds:
        assert fold.fold is folds and (fold.reason == FOLDS) is folds
        assert (fold.error < 1e-5) if folds else (fold.error > 1e-3)
    page = (tmp_path / "report" / "report.html").read_text()
    assert folds or "does not commute with a rotation" in page
    # Undone on the attention output, the rotation is exact on all of them.
    model = tiny_model(model_type, **options)
    tokens = tiny_tokens(32)[None]
    rotation = torch.linalg.qr(torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(3))).Q

    def explicit(call):
        heads, dims = call.value.shape[1], call.value.shape[3]
        own = rotation[:1, :dims, :dims] if dims == 32 else torch.linalg.qr(torch.randn(1, dims, dims)).Q
        own = own.expand(heads, dims, dims)
        output = plain_attention(replace(call, value=call.value @ own))
        return output @ own.mT.repeat_interleave(output.shape[1] // heads, 0)

    plain = forward(model, tokens)
    with attention_hook(model, explicit):
        undone = forward(model, tokens)
    assert (undone - plain).norm() / plain.norm() < 1e-4
    verify(made.folder / "report")


def test_experts_in_the_projection_are_refused(world: World, tmp_path: Path, refused) -> None:
    save_tiny(tmp_path / "model", "jetmoe")
    line = refused(2, "collect", tmp_path / "model", "--data", world.text, "--out", tmp_path / "stats", "-q")
    assert "jetmoe" in line and not (tmp_path / "stats").exists()
