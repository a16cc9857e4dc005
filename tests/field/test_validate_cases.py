"""What went wrong in the field when a quantized cache was judged, kind by kind, and the test that keeps it out.

| kind | tests |
|---|---|
| low reconstruction error, broken softmax | test_attention_numbers_rule_and_reconstruction_only_informs |
| prompts too short to read a coded row | test_contexts_inside_the_windows_are_refused, test_the_share_of_coded_reads_is_reported |
| windows dropped on the way to the server | test_windows_belong_to_the_artifact_and_are_measured |
| recent window that is flushed as a whole | test_the_last_tokens_are_exact_at_every_length |
| one layer that ruins the model | test_the_worst_layer_leads_the_table_and_skipping_it_helps |
"""  # noqa: E501

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcq.artifacts.bundle import open_bundle
from kvcq.artifacts.fit_file import read_fit
from kvcq.cli.main import execute
from kvcq.errors import InputError
from kvcq.evaluation.simulate import exact_by_query
from kvcq.reports import render_html, report_text
from kvcq.reports.layers import layer_table
from kvcq.runtime.layout import PAGE
from kvcq.spec.plan import Windows
from tests.chain import World, llama_world
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return llama_world(tmp_path_factory.getbasetemp())


def changed_world(world: World, folder: Path, model: torch.nn.Module) -> World:
    model.save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    changed = replace(world, folder=folder, model=folder / "model", fits={})
    changed.collect(changed.stats)
    return changed


def test_attention_numbers_rule_and_reconstruction_only_informs(world: World, tmp_path: Path) -> None:
    """One channel so large that coding it alone makes the key error small, while all logits are lost."""
    model = tiny_model("qwen2")
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias[15::32] = 200.0
    large = changed_world(world, tmp_path, model)
    bad, good = large.fit(tmp_path / "naive", "naive-int2"), large.fit(tmp_path / "nova", "nova")
    (tmp_path / "gates.yaml").write_text("gates: [{metric: kl, max: 0.2}]")
    result = large.validate(tmp_path / "report", bad, good, canary=(), gates=tmp_path / "gates.yaml")
    _, naive, nova = (row.contexts[-1].metrics for row in result.report.artifacts)
    assert naive.k_error < 0.01  # what a reconstruction test would pass
    assert naive.k_centred_error > 0.1 and naive.kl > 10 * nova.kl
    assert [line.split(":")[0] for line in result.failed_gates] == ["naive"]
    text = report_text(result.report, width=120)
    assert text.startswith("FAIL") and "KL" in text and "Output" in text and "Keys" in text


def test_contexts_inside_the_windows_are_refused(world: World, tmp_path: Path, capsys) -> None:
    arguments = ["validate", world.fits["nova"], "--model", world.model, "--data", world.held_out, "--contexts", "10"]
    assert execute([*map(str, arguments), "--out", str(tmp_path / "report")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: nothing was quantized in this run") and not list(tmp_path.iterdir())
    # The margin is stated: sink, recent and 64 more are not enough, one token more is.
    with pytest.raises(InputError, match="76"):
        world.validate(tmp_path / "report", world.fits["nova"], contexts=(76,), canary=())
    assert world.validate(tmp_path / "report", world.fits["nova"], contexts=(77,), canary=()).path


def test_the_share_of_coded_reads_is_reported(world: World, tmp_path: Path) -> None:
    report = world.validate(tmp_path / "report", world.fits["nova"], canary=()).report
    exact, nova = report.artifacts
    shares = [entry.quantized_share for entry in nova.contexts]
    assert 0.5 < shares[0] < shares[1] < 1.0 and exact.contexts[0].quantized_share == 0.0
    counted = exact_by_query(96, Windows(sink=4, recent=8))[-24:]
    causal = torch.ones(96, 96, dtype=torch.bool).tril()[-24:]
    assert abs(shares[0] - float((~counted & causal).sum() / causal.sum())) < 0.02
    for text in (report_text(report, width=120), render_html(report)):
        assert all(f"{100 * share:.1f}%" in text for share in shares)


def test_windows_belong_to_the_artifact_and_are_measured(world: World, tmp_path: Path) -> None:
    """Without windows the same codes lose more; the bundle carries its own, and another fit is another digest."""
    bare = world.fit(tmp_path / "bare", "oscar", "windows.sink=0", "windows.recent=0")
    report = world.validate(tmp_path / "report", world.fits["oscar"], bare).report
    _, kept, dropped = report.artifacts
    assert dropped.contexts[-1].metrics.kl > kept.contexts[-1].metrics.kl
    assert dropped.bits["160"] < kept.bits["160"]
    assert dropped.tensors_digest == kept.tensors_digest and dropped.windows != kept.windows
    manifest = open_bundle(
        replace(world, fits={"bare": bare, **world.fits}).pack("oscar", tmp_path / "it.kvcq")
    ).manifest
    assert (manifest.recipe.windows.sink, manifest.recipe.windows.recent) == (4, 8)
    assert read_fit(bare).header.digest != read_fit(world.fits["oscar"]).header.digest


@pytest.mark.parametrize("recent", [1, 3, PAGE - 1, PAGE, PAGE + 7])
def test_the_last_tokens_are_exact_at_every_length(recent: int) -> None:
    """At every step the latest R rows are exact, the own one included, across page borders; never fewer, never more."""
    windows = Windows(sink=2, recent=recent)
    whole = exact_by_query(3 * recent + PAGE + 2, windows)
    for length in range(1, 3 * recent + PAGE + 2):
        step = exact_by_query(length, windows, first=length - 1)[0]
        assert step.equal(whole[length - 1, :length])
        exact = step.nonzero().flatten().tolist()
        assert exact == sorted({*range(min(2, length)), *range(max(0, length - recent), length)})


def test_the_worst_layer_leads_the_table_and_skipping_it_helps(world: World, tmp_path: Path) -> None:
    model = tiny_model()
    model.model.layers[2].self_attn.k_proj.weight[15::32] *= 60.0
    broken = changed_world(world, tmp_path, model)
    whole = broken.fit(tmp_path / "whole", "naive-int2")
    arguments = ["fit", broken.stats, "--method", "naive-int2", "--skip-layers", "2", "--out", tmp_path / "without"]
    windows = ("--set", "windows.sink=4", "--set", "windows.recent=8")
    assert execute([*map(str, arguments), *windows]) == 0
    header = read_fit(tmp_path / "without").header
    assert header.recipe.skip_layers == (2,) and header.plan[2].reason == "skipped by the recipe"
    report = broken.validate(tmp_path / "report", whole, tmp_path / "without", canary=()).report
    table = layer_table(report.artifacts[1])
    losses = [layer.metrics.kl for layer in report.artifacts[1].layers]
    order = [int(row[0].text) for row in table.groups[0].rows]
    assert order[0] == 2 and [losses[layer] for layer in order] == sorted(losses, reverse=True)
    _, bad, good = report.artifacts
    assert good.contexts[-1].metrics.kl < bad.contexts[-1].metrics.kl / 2
    assert good.skipped_layers == {"2": "skipped by the recipe"}
    worst = report_text(report).partition("Worst layers and heads")[2].splitlines()
    first = next(line for line in worst if line.startswith("whole"))
    assert next(word for word in first.split() if word.startswith("L")) == "L2"
