import json
from types import SimpleNamespace

import pytest
import torch

from kvcq.artifacts.bundle import open_bundle
from kvcq.runtime.sglang import admission, metrics, plugin, versions
from tests.chain import make_world
from tests.runtime.sglang import small
from tests.runtime.sglang.wheels import VERSIONS, Sources


@pytest.fixture(params=[pytest.param(version, marks=pytest.mark.network) for version in VERSIONS])
def sources(request):
    """Every release of SGLang that the plugin supports, one after the other."""
    return Sources(request.param)


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    made = make_world(
        tmp_path_factory.mktemp("sglang") / "world", ("oscar",), num_hidden_layers=2, num_key_value_heads=1
    )
    return made.model, made.pack("oscar", made.folder / "oscar.kvcq")


@pytest.fixture
def start(world, monkeypatch, tmp_path):
    """A function from a release and flags to a small SGLang whose plugins have been loaded."""
    model, path = world
    digest = open_bundle(path).manifest.digest

    def begin(version="0.5.15.post1", override=None, **flags):
        host = small.install(monkeypatch, version)
        monkeypatch.setattr(versions, "installed", lambda: version)
        monkeypatch.setattr(plugin, "_PROCESS", plugin._Process())
        monkeypatch.setattr(metrics, "_published", [])
        admission.uninstall()
        given = {"bundle": str(path), "digest": digest, "trace": str(tmp_path / "trace.jsonl")} | (override or {})
        config = json.loads((model / "config.json").read_text())
        hf_config = SimpleNamespace(kvcq=given, to_dict=lambda: config)
        host.config = SimpleNamespace(
            hf_config=hf_config,
            dtype=torch.float32,
            num_attention_heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            layers=config["num_hidden_layers"],
            context_len=256,
        )
        chosen = {
            "attention_backend": "kvcq",
            "max_running_requests": 3,
            "page_size": 64,
            "tp_size": 1,
            "enable_metrics": False,
            "chunked_prefill_size": 8192,
            # Models are served in bfloat16, whose products are wrong in the interpreter.
            "config": SimpleNamespace(**vars(host.config) | {"dtype": torch.bfloat16}),
        }
        host.args = host.ServerArgs(**chosen | flags)
        plugin.activate()
        host.registry.apply_hooks()
        return host

    yield begin
    admission.uninstall()
