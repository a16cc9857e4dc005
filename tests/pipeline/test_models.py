"""Models whose attention is more than a softmax of q k: windows, learned sinks, softcap, biases, gates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvcq.artifacts.bundle import open_bundle
from kvcq.artifacts.fit_file import read_fit
from kvcq.artifacts.report_file import read_report
from kvcq.artifacts.stats_file import read_stats
from kvcq.errors import InputError, UnsupportedError
from kvcq.evaluation.canary import canary_statistic
from kvcq.pipeline.inspect import inspect, verify
from kvcq.pipeline.requests import ValidateRequest
from kvcq.pipeline.validate import validate
from tests.chain import World, make_world
from tests.pipeline.test_fit_options import Listener
from tests.tiny import save_tiny, tiny_model, tiny_tokenizer

ALL, EVEN, ODD = [0, 1, 2, 3], [0, 2], [1, 3]
# Model type, and the layers that attend to the whole context.
TYPES = {"gemma3_text": ODD, "gpt_oss": ODD, "gemma2": ODD, "qwen2": ALL, "qwen3_next": EVEN}


@pytest.fixture(scope="module", params=TYPES)
def typed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("types") / request.param
    return make_world(folder, ("oscar-centered", "nova"), model_type=request.param, collecting={"num_tokens": 768})


def model_type(world: World) -> str:
    return read_fit(world.fits["nova"]).header.geometry.model_type


def test_other_layers_stay_bf16_with_the_reason(typed: World, tmp_path: Path) -> None:
    header = read_fit(typed.fits["nova"]).header
    full = TYPES[header.geometry.model_type]
    kind = "linear" if header.geometry.model_type == "qwen3_next" else "sliding"
    assert [entry.layer for entry in header.plan if entry.quantized] == full
    assert all(f"{kind} attention" in entry.reason for entry in header.plan if not entry.quantized)
    assert all(int(entry.name.split(".")[1]) in full for entry in header.tensors)
    row = read_report(typed.report).report.artifacts[2]
    assert list(row.quantized_layers) == full and [layer.layer for layer in row.layers] == full
    assert sorted(map(int, row.skipped_layers)) == sorted(set(ALL) - set(full))
    text = inspect(typed.fits["nova"]).text()
    assert f"{len(full)} of 4 quantized" in text and (len(full) == 4 or f"BF16: {kind} attention" in text)


def test_report_holds_numbers_that_make_sense(typed: World) -> None:
    exact, centred, nova = read_report(typed.report).report.artifacts
    for row in (centred, nova):
        for before, after in zip(exact.contexts, row.contexts, strict=True):
            assert before.metrics.kl < 1e-4 < after.metrics.kl < 1.0
            assert 0.0 < after.metrics.output_error < 1.0
        assert {fold.layer for fold in row.folds} == set(row.quantized_layers)


def test_canary_is_bound_to_the_untouched_model(typed: World, tmp_path: Path) -> None:
    """b is what the library's own eager attention computes; s is measurably not."""
    out = typed.pack("nova", tmp_path / "it.kvcq")
    verify(out)
    canary = open_bundle(out).canary
    model = tiny_model(model_type(typed))
    model.set_attn_implementation("eager")
    tokens = torch.from_numpy(canary["tokens"].astype(np.int64))
    with torch.no_grad():
        log_probs = torch.cat([model(row.unsqueeze(0), use_cache=False).logits for row in tokens])
    log_probs = log_probs.double().log_softmax(-1)[:, torch.from_numpy(canary["positions"].astype(np.int64))]
    x = log_probs.gather(-1, torch.from_numpy(canary["ids"].astype(np.int64))).numpy()
    assert np.abs(x - canary["b"]).max() < 2e-3
    assert abs(canary_statistic(x, canary["b"], canary["s"])) < 0.05
    assert canary_statistic(canary["s"], canary["b"], canary["s"]) == 1.0


def test_a_model_without_an_eligible_layer_is_refused(world: World, tmp_path: Path) -> None:
    save_tiny(tmp_path / "mistral", "mistral")
    with pytest.raises(UnsupportedError, match=r"all layers are sliding.*mistral"):
        world.collect(tmp_path / "stats", model=str(tmp_path / "mistral"))
    assert not (tmp_path / "stats").exists()


def test_a_latent_cache_is_refused_by_name(world: World, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "deepseek_v3")
    with pytest.raises(UnsupportedError, match="deepseek_v3") as caught:
        world.collect(tmp_path / "stats", model=str(tmp_path / "model"))
    assert "MLA" in str(caught.value) or "latent" in str(caught.value)


def test_large_key_bias_is_told_where_the_method_does_not_centre(tmp_path: Path, world: World) -> None:
    """Qwen2's large key biases: fit and report name the layers, and centring repairs them."""
    model = tiny_model("qwen2")
    for layer in (0, 3):
        # A channel that hardly turns over the context, so that the mean survives RoPE.
        model.model.layers[layer].self_attn.k_proj.bias[15::32] = 60.0
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    biased = replace(world, folder=tmp_path, model=tmp_path / "model", fits={})
    biased.collect(biased.stats, num_tokens=768)
    plain, centred = (biased.fit(tmp_path / name, name) for name in ("naive-int2", "nova"))
    warning = next(line for line in read_fit(plain).header.warnings if "mean" in line)
    assert "layers 0, 3" in warning
    assert not any("mean" in line for line in read_fit(centred).header.warnings)
    report = biased.validate(tmp_path / "report", plain, centred, canary=()).report
    _, naive, nova = (row.contexts[-1].metrics for row in report.artifacts)
    assert report.artifacts[1].warnings and not report.artifacts[2].warnings[1:]
    assert nova.kl < naive.kl and nova.output_error < naive.output_error


def test_head_dims_that_are_no_power_of_two_run_the_whole_chain(tmp_path: Path) -> None:
    made = make_world(
        tmp_path / "odd",
        ("quarot-int2", "oscar", "nova"),
        head_dim=48,
        num_hidden_layers=2,
        collecting={"num_tokens": 768},
    )
    verify(made.pack("oscar", tmp_path / "it.kvcq"))
    with pytest.raises(InputError, match="groups=5"):
        made.fit(tmp_path / "fit", "quarot-int2", "groups=5")


def test_rope_regime_is_that_of_the_sequences_and_is_told(tmp_path: Path, world: World) -> None:
    """Phi-3's longrope: keys change with the length of the sequence, so a fit of one regime is not the other's."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 128,
    }
    fields = {"head_dim": 16, "rope_parameters": rope, "original_max_position_embeddings": 128}
    save_tiny(tmp_path / "model", "phi3", **fields)
    made = replace(world, folder=tmp_path, model=tmp_path / "model", fits={})
    seen = {}
    for length in (96, 192):
        header = read_stats(made.collect(tmp_path / str(length), seq_len=length, chunk=length)).header
        seen[length] = [rope.regime for rope in header.geometry.ropes]
        assert any("RoPE longrope" in line for line in header.warnings)
    assert seen == {96: ["longrope:short"], 192: ["longrope:long"]}
    (tmp_path / "96").rename(made.stats)
    fit = made.fit(tmp_path / "fit", "nova")
    listener = Listener()
    request = ValidateRequest(
        artifacts=(fit,), model=str(made.model), data=(str(world.held_out),), out=tmp_path / "r", contexts=(192,)
    )
    validate(replace(request, canary=()), listener)
    assert any("different RoPE regimes" in line for line in listener.warnings)
