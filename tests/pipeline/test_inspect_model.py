"""inspect MODEL: the plan of every layer, told without collecting."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcq.errors import InputError, UnsupportedError
from kvcq.pipeline.inspect import is_artifact
from kvcq.pipeline.inspect_model import inspect_model
from kvcq.pipeline.requests import InspectRequest
from kvcq.runtime.layout import covered_share
from kvcq.spec.geometry import LayerGeometry, ModelGeometry
from tests.architectures.test_positions import longrope
from tests.chain import World, bare_environment
from tests.tiny import save_tiny


def view(folder: Path, model_type: str = "llama", context: int | None = None, **fields: object):
    save_tiny(folder / model_type, model_type, **fields)
    return inspect_model(InspectRequest(model=str(folder / model_type), context=context))


def table(answer) -> list[list[str]]:
    """Return the rows of the table, split at two spaces."""
    lines = answer.text().split("\n\n")[1].splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[1:]]


def test_equal_layers_share_a_row(tmp_path: Path) -> None:
    answer = view(tmp_path)
    assert table(answer) == [["0-3", "full", "4/2", "32/32", "default, 32 of 32 half", "-", "2-bit"]]
    assert "4 of 4 can be quantized" in answer.text() and "100.0 % of the KV bytes at 512 tokens" in answer.text()
    assert str(tmp_path) not in answer.text() + json.dumps(answer.payload())


def test_windows_softcaps_sinks_and_reasons_are_shown(tmp_path: Path) -> None:
    assert table(view(tmp_path, "gpt_oss"))[:2] == [
        ["0", "sliding", "4/2", "32/32", "yarn x1.347, 32 of 32 half", "window 16, sinks", "BF16: sliding attention"],
        ["1", "full", "4/2", "32/32", "yarn x1.347, 32 of 32 half", "sinks", "2-bit"],
    ]
    assert table(view(tmp_path, "gemma2"))[1][5] == "softcap 2"
    assert table(view(tmp_path, "qwen3_next"))[1] == ["1", "linear", *"----", "BF16: linear attention"]
    assert table(view(tmp_path, "gemma3n_text"))[4][-1] == "BF16: shared attention, reads the cache of layer 2"
    assert table(view(tmp_path, "stablelm", hidden_size=96))[0][-1].startswith(
        "BF16: head dimension 24/24 is no multiple"
    )


def test_the_share_is_that_of_bytes_not_of_layers(tmp_path: Path) -> None:
    answer = view(tmp_path, "gemma3_text", context=512)
    assert answer.payload()["covered_share"] == pytest.approx(512 / (512 + 16))
    assert [layer["quantizable"] for layer in answer.payload()["layers"]] == [False, True, False, True]
    chunked = view(tmp_path, "llama4_text", context=64).payload()
    assert chunked["covered_share"] == pytest.approx(64 / (64 + 3 * 16))


def test_a_model_without_eligible_layers_is_shown_and_only_collect_refuses_it(tmp_path: Path) -> None:
    answer = view(tmp_path, "mistral")
    assert answer.payload()["covered_share"] == 0.0 and "0 of 4 can be quantized" in answer.text()


def test_the_context_selects_the_rope_regime(tmp_path: Path) -> None:
    for context, regime in ((64, "longrope:short"), (200, "longrope:long")):
        payload = view(tmp_path / str(context), "phi3", context=context, **longrope(64)).payload()
        assert [rope["regime"] for rope in payload["ropes"]] == [regime]
        assert all(layer["unrotates"] for layer in payload["layers"])


def test_refusals_are_those_of_collect(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="MLA latent cache is not supported"):
        view(tmp_path, "deepseek_v3")
    with pytest.raises(UnsupportedError, match="its own attention code path"):
        view(tmp_path, "falcon")
    with pytest.raises(InputError, match="config"):
        inspect_model(InspectRequest(model=str(tmp_path)))


def test_a_path_is_an_artifact_unless_it_is_a_model(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", tokenizer=False)
    (tmp_path / "it.kvcq").write_bytes(b"")
    (tmp_path / "it.gguf").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    artifacts = [tmp_path / "it.kvcq", tmp_path / "folder", tmp_path / "missing", "missing.kvcq", "./missing", "a/b/c"]
    assert all(is_artifact(str(target)) for target in artifacts)
    models = [model, tmp_path / "it.gguf", "smollm2-135m", "organisation/name", "name"]
    assert not any(is_artifact(str(target)) for target in models)


def test_shared_and_linear_layers_hold_no_bytes() -> None:
    sizes = {"q_heads": 4, "kv_heads": 2, "d_k": 32, "d_v": 16}
    layers = (
        LayerGeometry(layer=0, kind="full", **sizes),
        LayerGeometry(layer=1, kind="shared", source=0, **sizes),
        LayerGeometry(layer=2, kind="linear", q_heads=0, kv_heads=0, d_k=0, d_v=0),
    )
    geometry = ModelGeometry(model_type="x", hidden_size=1, vocab_size=1, layers=layers)
    assert covered_share([0], geometry, 100) == 1.0 and covered_share([], geometry, 100) == 0.0


def test_the_command_prints_the_table_or_one_object_and_artifacts_need_no_torch(world: World, tmp_path: Path) -> None:
    def run(*arguments: str, code: str = "from kvcq.cli.main import run; run()"):
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, env=bare_environment(), capture_output=True, text=True, check=False)

    shown = run("inspect", str(world.model), "--json", "--context", "1k", "-q")
    assert shown.returncode == 0 and shown.stderr == ""
    assert json.loads(shown.stdout)["context"] == 1024
    blocked = "import sys; sys.modules['torch'] = None; from kvcq.cli.main import run; run()"
    assert "kind" in run("inspect", str(world.stats), code=blocked).stdout
