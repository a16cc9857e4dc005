"""The whole chain on every supported architecture, and refusals in one line before anything is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from kvcq.artifacts.bundle import open_bundle
from kvcq.artifacts.stats_file import read_stats
from kvcq.cli.main import explain
from kvcq.errors import UnsupportedError
from kvcq.models.geometry import refuse_by_config
from kvcq.pipeline.inspect import verify
from kvcq.spec.geometry import ModelGeometry
from tests.architectures.table import ARCHITECTURES, LATENT, REFUSED, Architecture, found
from tests.chain import World, write_text
from tests.library import dispatched_by_name
from tests.tiny import save_tiny, tiny_model

METHODS = ("naive-int2", "oscar-centered", "nova")
COLLECTING = {"num_tokens": 640, "seq_len": 64, "chunk": 40, "rows": 256, "query_rows": 32}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Two texts, shared by all models."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("texts")
    text, held_out = (write_text(folder / f"{seed}.txt", seed, 300) for seed in (1, 2))
    return World(folder=folder, model=folder, text=text, held_out=held_out, contexts=(96,))


def check_plan(architecture: Architecture, geometry: ModelGeometry) -> None:
    expected = [replace(layer, reason="") for layer in architecture.layers]
    assert [found(geometry, layer) for layer in geometry.layers] == expected
    assert {rope.regime for rope in geometry.ropes} <= {architecture.regime}
    assert all(layer.unrotates for layer in geometry.quantizable())


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_the_chain_runs_and_every_layer_is_what_the_table_says(
    texts: World, tmp_path: Path, architecture: Architecture
) -> None:
    model = save_tiny(tmp_path / "model", architecture.model_type, **architecture.overrides)
    world = replace(texts, folder=tmp_path, model=model, fits={})
    with dispatched_by_name():
        world.collect(world.stats, **COLLECTING)
    header = read_stats(world.stats).header
    check_plan(architecture, header.geometry)
    for method in METHODS:
        world.fits[method] = world.fit(tmp_path / method, method)
    report = world.validate(world.report, *world.fits.values(), queries=8, canary=("nova",)).report
    exact, naive, _, nova = (row.contexts[0].metrics for row in report.artifacts)
    assert exact.kl < 1e-4 < nova.kl and nova.output_error < max(naive.output_error, 0.5)
    bundle = open_bundle(world.pack("nova", tmp_path / "it.kvcq"))
    assert verify(tmp_path / "it.kvcq").record["ok"]
    assert bundle.manifest.geometry == header.geometry
    plan = bundle.manifest.plan
    assert [entry.layer for entry in plan if entry.quantized] == architecture.quantized
    assert [entry.reason or "" for entry in plan] == [layer.reason for layer in architecture.layers]


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_served_is_refused_in_one_line_before_anything_is_written(
    texts: World, tmp_path: Path, model_type: str
) -> None:
    model = save_tiny(tmp_path / "model", model_type)
    with pytest.raises(UnsupportedError, match=REFUSED[model_type]) as refusal:
        replace(texts, model=model).collect(tmp_path / "stats", **COLLECTING)
    line, code = explain(refusal.value)
    assert code == 2 and "\n" not in line and model_type in line
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("model_type", LATENT)
def test_latent_caches_are_refused_by_their_configuration_alone(model_type: str) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {model_type}")
    with pytest.raises(UnsupportedError, match="latent cache is not supported"):
        refuse_by_config(CONFIG_MAPPING[model_type]())


def test_a_refused_configuration_costs_no_download_of_weights(texts: World, tmp_path: Path) -> None:
    tiny_model("deepseek_v3").config.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    save_tiny(tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(UnsupportedError, match="MLA"):
        replace(texts, model=tmp_path / "model").collect(tmp_path / "stats", **COLLECTING)
