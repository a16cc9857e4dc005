"""Types that are in no list: what decides is what the model does, not what it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, dynamic_module_utils

from kvcq.artifacts.bundle import open_bundle
from kvcq.artifacts.stats_file import read_stats
from kvcq.errors import UnsupportedError
from kvcq.pipeline.collect import collect
from kvcq.pipeline.inspect import verify
from kvcq.pipeline.requests import CollectRequest
from tests.architectures import copies
from tests.architectures.test_chain import COLLECTING
from tests.chain import World, write_text
from tests.pipeline.test_fit_options import Listener
from tests.tiny import T0, tiny_tokenizer

CHEATS = {
    "OwnSoftmax": "the layer does not pass through the attention function.*layer 1",
    "NoMask": "logits through the attention hook differ from the eager model's.*first at layer 1",
    "ScaledValues": "captured values are not what the model caches.*layer 1",
}


@pytest.fixture(scope="module", autouse=True)
def _registered():
    for config, model in ((copies.CopyConfig, copies.CopyForCausalLM), (copies.CheatConfig, copies.CheatForCausalLM)):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)


def save(folder: Path, cls, **fields: object) -> Path:
    torch.manual_seed(0)
    model = cls(cls.config_class(**T0 | {"num_hidden_layers": 3}, **fields)).requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def world(tmp_path: Path) -> World:
    torch.set_num_threads(1)
    text, held_out = (write_text(tmp_path / f"{seed}.txt", seed, 300) for seed in (1, 2))
    return World(folder=tmp_path, model=tmp_path / "model", text=text, held_out=held_out, contexts=(96,))


def test_an_unheard_of_type_runs_the_whole_chain(world: World) -> None:
    save(world.model, copies.CopyForCausalLM)
    world.collect(world.stats, **COLLECTING)
    geometry = read_stats(world.stats).header.geometry
    assert geometry.model_type == "unheard_of" and [layer.unrotates for layer in geometry.layers] == [True] * 3
    world.fits["nova"] = world.fit(world.folder / "nova", "nova")
    world.validate(world.report, world.fits["nova"], queries=8)
    bundle = open_bundle(world.pack("nova", world.folder / "it.kvcq"))
    assert verify(world.folder / "it.kvcq").record["ok"]
    assert all(entry.quantized for entry in bundle.manifest.plan)


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_copy_that_cheats_is_refused_with_its_layer(world: World, cheat: str) -> None:
    save(world.model, copies.CheatForCausalLM, cheat=cheat)
    with pytest.raises(UnsupportedError, match=CHEATS[cheat]) as refusal:
        world.collect(world.stats, **COLLECTING)
    assert "\n" not in str(refusal.value) and "cheat" in str(refusal.value)
    assert not world.stats.exists()


@pytest.fixture
def remote(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A folder that brings its own code, and a module cache inside the test's folder."""
    save(world.model, copies.CheatForCausalLM, cheat="OwnSoftmax")
    path = world.model / "config.json"
    classes = {"AutoConfig": "own.CheatConfig", "AutoModelForCausalLM": "own.CheatForCausalLM"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "brought_along", "auto_map": classes}))
    code = Path(copies.__file__).read_text().replace('"cheat"', '"brought_along"')
    (world.model / "own.py").write_text(code)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(world.folder / "modules"))
    monkeypatch.syspath_prepend(str(world.folder / "modules"))
    return world


def test_own_code_is_not_run_unasked(remote: World) -> None:
    with pytest.raises(UnsupportedError, match=r"brings its own code.*--trust-remote-code"):
        remote.collect(remote.stats, **COLLECTING)


def test_trusted_code_is_told_and_refused_where_it_bypasses_the_hook(remote: World) -> None:
    listener = Listener()
    request = CollectRequest(
        model=str(remote.model), data=(str(remote.text),), out=remote.stats, trust_remote_code=True, **COLLECTING
    )
    with pytest.raises(UnsupportedError, match=r"does not pass through the attention function.*layer 1"):
        collect(request, listener)
    assert any("runs its own code: CheatForCausalLM" in line for line in listener.notes)
    assert not remote.stats.exists()


def test_trusted_code_that_behaves_is_collected(remote: World) -> None:
    code = remote.model / "own.py"
    code.write_text(
        code.read_text().replace("attention(config, CHEATING_LAYER)", "LlamaAttention(config, CHEATING_LAYER)")
    )
    remote.collect(remote.stats, trust_remote_code=True, **COLLECTING)
    assert len(read_stats(remote.stats).header.geometry.quantizable()) == 3
