"""What went wrong in the field when transforms were fitted, kind by kind, and the test that keeps it out.

| kind | tests |
|---|---|
| fewer tokens than channels | test_few_rows_give_whole_rotations_and_no_nan, test_missing_rank_is_told_with_its_layer |
| head dimensions that are no power of two | test_rotations_of_any_head_dimension_are_orthogonal_and_undone |
| KV heads that want unrelated bases | test_heads_with_their_own_axes_are_told_what_sharing_costs |
| sums or rotations in half precision | test_half_precision_models_are_summed_and_rotated_in_full |
| huge key biases | test_huge_key_biases_are_found_and_survived |
| two fits of the same statistics | test_two_fits_are_one_file_at_any_thread_count, test_every_knob_is_in_the_header |
| groups that do not divide the head dimension | test_groups_are_checked_before_the_fit_and_the_allowed_ones_listed |
| calibrated on one text, served on another | test_the_own_text_stands_beside_the_calibration_text |
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvcq.artifacts.fit_file import read_fit
from kvcq.artifacts.stats_file import read_stats
from kvcq.cli.main import execute
from kvcq.errors import InputError
from kvcq.methods import registry
from kvcq.methods.base import FitContext
from kvcq.methods.nova import Nova
from kvcq.methods.oscar import Oscar
from kvcq.models.attention import AttentionCall, attention_hook, plain_attention
from kvcq.models.library import forward
from kvcq.pipeline.fit import fit
from kvcq.pipeline.inspect import inspect
from kvcq.pipeline.requests import FitRequest
from kvcq.stats.part import layer_stats
from tests.chain import CHEAP, WINDOWS, World, contents, llama_world, write_text
from tests.methods.synthetic import stats_of
from tests.pipeline.test_fit_options import Listener
from tests.tiny import tiny_model, tiny_tokenizer, tiny_tokens

QUANTIZING = [name for name in registry.available() if registry.load(name).quantizes]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return llama_world(tmp_path_factory.getbasetemp())


def changed_world(world: World, folder: Path, model: torch.nn.Module) -> World:
    """Return a world of its own folder for a model changed in memory; nothing is collected yet."""
    model.save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    return replace(world, folder=folder, model=folder / "model", fits={})


@pytest.mark.parametrize("name", QUANTIZING)
def test_few_rows_give_whole_rotations_and_no_nan(name: str) -> None:
    """Ten rows of 64 channels: covariances of rank ten, from which every transform must still be invertible."""
    rows = torch.randn(3, 2, 10, 64, generator=torch.Generator().manual_seed(0))
    parameters = {"rows": 256, "iterations": 1} if name == "nova" else {}
    result = registry.create(name, parameters).fit_layer(stats_of(*rows), FitContext())
    for role, array in result.tensors.items():
        assert np.isfinite(array.astype(np.float64)).all(), role
    for side, spec in (("k", result.k), ("v", result.v)):
        if spec.transform != "identity":
            forward_map = result.tensors[f"{side}.transform"].astype(np.float64)
            dual = result.tensors.get(f"{side}.query", forward_map).astype(np.float64)
            assert np.abs(forward_map.swapaxes(-1, -2) @ dual - np.eye(64)).max() < 1e-4


def test_missing_rank_is_told_with_its_layer(world: World, tmp_path: Path) -> None:
    model = tiny_model()
    weight = model.model.layers[2].self_attn.v_proj.weight
    weight.copy_(weight[:, :3] @ torch.randn(3, 64, generator=torch.Generator().manual_seed(1)) / 3)
    poor = changed_world(world, tmp_path, model)
    poor.collect(poor.stats)
    listener = Listener()
    for name in QUANTIZING:
        settings = (*WINDOWS, *CHEAP.get(name, ()))
        fit(FitRequest(stats=poor.stats, out=tmp_path / name, method=name, settings=settings), listener)
        header = read_fit(tmp_path / name).header
        assert header.notes["layers.2.rank"] == (32, 32, 32, 3)
        (warning,) = (line for line in header.warnings if "moments of rank" in line)
        assert "2" in warning.split(":")[0] and "rank 3 for 32 channels in layer 2" in warning
    assert "collect more text" in listener.warnings[0]
    report = poor.validate(tmp_path / "report", *(tmp_path / name for name in QUANTIZING), canary=()).report
    assert all(np.isfinite(row.contexts[-1].metrics.kl) for row in report.artifacts)


class Rotated:
    """Attention with keys and values stored in the frame of a fit, and nothing quantized."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors = {name: torch.from_numpy(array) for name, array in tensors.items()}

    def of(self, layer: int, role: str) -> Tensor | None:
        return self.tensors.get(f"layers.{layer}.{role}")

    def __call__(self, call: AttentionCall) -> Tensor:
        group = call.query.shape[1] // call.key.shape[1]
        key_map, value_map = self.of(call.layer, "k.transform"), self.of(call.layer, "v.transform")
        key, query, value = call.key, call.query, call.value
        if key_map is not None:
            query_map = self.of(call.layer, "k.query")
            key = key @ key_map
            query = query @ (key_map if query_map is None else query_map).repeat_interleave(group, 0)
        if value_map is not None:
            value = value @ value_map
        output = plain_attention(replace(call, key=key, query=query, value=value))
        return output if value_map is None else output @ value_map.mT.repeat_interleave(group, 0)


@pytest.mark.parametrize("head_dim", [48, 80, 96, 112, 192])
def test_rotations_of_any_head_dimension_are_orthogonal_and_undone(world: World, tmp_path: Path, head_dim: int) -> None:
    """Block Hadamard on the largest power of two, in every method; the rotated cache gives the same logits."""
    model = tiny_model(head_dim=head_dim, num_hidden_layers=2)
    odd = changed_world(world, tmp_path, model)
    odd.collect(odd.stats, num_tokens=1280)
    tokens = tiny_tokens(48)[None]
    plain = forward(model, tokens)
    for name in ("quarot-int2", "klt-int2", "oscar"):
        tensors = read_fit(odd.fit(tmp_path / name, name)).tensors
        assert set(tensors) == {f"layers.{layer}.{side}.transform" for layer in (0, 1) for side in "kv"}
        for array in tensors.values():
            exact = array.astype(np.float64)
            assert np.abs(exact @ exact.swapaxes(-1, -2) - np.eye(head_dim)).max() < 1e-6
        with attention_hook(model, Rotated(tensors)):
            rotated = forward(model, tokens)
        assert (rotated - plain).norm() / plain.norm() < 1e-4


def test_heads_with_their_own_axes_are_told_what_sharing_costs(world: World, tmp_path: Path) -> None:
    """Two KV heads with orthogonal principal axes, each where its own queries look."""
    model = tiny_model()
    attention = model.model.layers[1].self_attn
    signal = 4.0 * attention.k_proj.weight[15].clone()
    for weight, heads in ((attention.k_proj.weight, 2), (attention.q_proj.weight, 4)):
        weight.mul_(0.02)
        for head in range(heads):
            # Channels 14 and 15 hardly turn. Equally strong and a little correlated: their average has no axis.
            strong, weak = (15, 14) if head < heads // 2 else (14, 15)
            weight[32 * head + strong] = signal
            weight[32 * head + weak] = 0.05 * signal
    moe = changed_world(world, tmp_path, model)
    moe.collect(moe.stats)
    own, shared = (moe.fit(tmp_path / kind, "oscar", f"granularity={kind}") for kind in ("head", "layer"))
    costs = [read_fit(path).header.notes["layers.1.shared_cost"] for path in (own, shared)]
    assert costs[0] == costs[1] and min(costs[0]) > 1.25
    assert not any("one rotation for all KV heads" in line for line in read_fit(own).header.warnings)
    (warning,) = (line for line in read_fit(shared).header.warnings if "one rotation for all KV heads" in line)
    assert "1" in warning.split(":")[0] and "granularity=head" in warning
    assert "shared_cost" in inspect(own).text()
    report = moe.validate(tmp_path / "report", own, shared, canary=()).report
    _, best, worse = (row.layers[1].metrics for row in report.artifacts)
    assert best.k_error < worse.k_error


def test_half_precision_models_are_summed_and_rotated_in_full(world: World, tmp_path: Path) -> None:
    """Queries 64 times larger, keys as much smaller: the model is the same, but Q'Q in fp16 would be infinite."""
    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.mul_(64)
        layer.self_attn.k_proj.weight.div_(64)
    half = changed_world(world, tmp_path, model.half())
    half.collect(half.stats, dtype="float16")
    stats = read_stats(half.stats)
    for layer in range(4):
        view = layer_stats(stats.header, stats.moments, stats.samples, layer)
        total = view.moments["q_second"] * view.tokens
        assert view.k_rows.dtype == torch.float32 and torch.isfinite(total).all()
        assert total.amax() > 65504  # what half precision cannot hold
        assert torch.linalg.eigvalsh(view.moments["q_second"]).min() >= -1e-9 * total.amax()
    for array in read_fit(half.fit(tmp_path / "fit", "oscar")).tensors.values():
        assert array.dtype == np.float32
        assert np.abs(array @ array.swapaxes(-1, -2) - np.eye(32)).max() < 1e-5


def test_huge_key_biases_are_found_and_survived(world: World, tmp_path: Path) -> None:
    """Qwen2's first and last layer: named by fit and report, and the methods that a user starts with survive."""
    model = tiny_model("qwen2")
    for layer in (0, 3):
        model.model.layers[layer].self_attn.k_proj.bias[15::32] = 60.0
    biased = changed_world(world, tmp_path, model)
    biased.collect(biased.stats)
    (tmp_path / "gates.yaml").write_text("gates: [{metric: kl, max: 0.2}, {metric: output_error, max: 0.2}]")
    sound = [biased.fit(tmp_path / name, name) for name in ("nova", "oscar-centered")]
    result = biased.validate(tmp_path / "report", *sound, canary=(), gates=tmp_path / "gates.yaml")
    assert result.failed_gates == ()
    for row in result.report.artifacts[1:]:
        large = {layer.layer for layer in row.layers if layer.mean_ratio > 4}
        assert large == {0, 3}
    for path in sound:
        means = {layer: read_fit(path).header.notes[f"layers.{layer}.mean_ratio"][0] for layer in range(4)}
        assert {layer for layer, ratio in means.items() if ratio > 4} == {0, 3}
        assert all(f"layer {layer}" in inspect(path).text() for layer in means)
        assert not any("outweighs" in line for line in read_fit(path).header.warnings)
    listener = Listener()
    fit(FitRequest(stats=biased.stats, out=tmp_path / "oscar", method="oscar", settings=WINDOWS), listener)
    assert any("layers 0, 3" in line and "skip_layers=0,3" in line for line in listener.warnings)


def test_two_fits_are_one_file_at_any_thread_count(world: World, tmp_path: Path) -> None:
    for name in ("oscar", "nova"):
        found = []
        for threads in (1, 4):
            torch.set_num_threads(threads)
            try:
                found.append(contents(world.fit(tmp_path / f"{name}-{threads}", name)))
            finally:
                torch.set_num_threads(1)
        assert found[0] == found[1]


@pytest.mark.parametrize("method", [Oscar, Nova])
def test_every_knob_is_in_the_header(world: World, method: type) -> None:
    header = read_fit(world.fits[method.name]).header
    recipe = header.recipe
    assert set(recipe.params) == {item.name for item in dataclasses.fields(method)}
    assert (recipe.windows.sink, recipe.windows.recent, recipe.seed, recipe.skip_layers) == (4, 8, 0, ())
    assert header.plan[0].v.clip == recipe.params["clip_v"] and header.plan[0].k.groups == recipe.params.get(
        "groups", 1
    )
    assert header.plan[0].k.codebook == recipe.params.get("codebook")


def test_groups_are_checked_before_the_fit_and_the_allowed_ones_listed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Oscar, "fit_layer", lambda *_: pytest.fail("a layer was fitted first"))
    arguments = ["fit", str(world.stats), "--method", "oscar", "--set", "groups=5", "--out", str(tmp_path / "fit")]
    assert execute(arguments) == 2 and execute([*arguments, "--dry-run"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "groups=5 does not divide the head dimension 32 of layer 0" in line
    assert "groups=1 (32 channels each) or 4 (8 channels each); to compare only: 2, 8, 16, 32" in line
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="head dimension 32"):
        world.fit(tmp_path / "fit", "naive-int2", "groups=64")


def test_the_own_text_stands_beside_the_calibration_text(world: World, tmp_path: Path) -> None:
    """The artifact says what it was calibrated on; validate takes any text, and the errors compare layer by layer."""
    code = tmp_path / "code.txt"
    code.write_text("\n".join(f"def f{i}(x): return x * {i} + [{i}, {i * 7}]" for i in range(400)))
    prose = write_text(tmp_path / "prose.txt", 3)
    source = read_fit(world.fits["nova"]).header.calibration
    assert source.sources == ("calibration.txt",) and len(source.sha256) == 64
    rows = {}
    for path in (world.text, prose, code):
        report = world.validate(tmp_path / f"r-{path.stem}", world.fits["nova"], data=(str(path),), canary=()).report
        assert report.data.sources == (path.name,)
        rows[path.name] = [layer.metrics.kl for layer in report.artifacts[1].layers]
    assert all(len(row) == 4 for row in rows.values())
    # The model is random, so only that both are measured and differ is a law.
    assert rows["code.txt"] != rows["calibration.txt"] != rows["prose.txt"]
