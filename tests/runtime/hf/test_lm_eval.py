"""lm-eval through the quantized cache; what needs lm-eval itself is skipped where it is not installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcq.errors import UnavailableError
from kvcq.runtime.hf import lm_eval as adapter
from tests.chain import World, make_world, python

TASK = """
task: echo
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
"""
GENERATE = """
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""
SCORE = """
doc_to_choice: ["a", "b"]
metric_list: [{metric: acc}]
"""


def test_a_missing_library_is_unavailable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    adapter.model_class.cache_clear()
    with pytest.raises(UnavailableError, match=r"kvcq\[eval\]"):
        adapter.model_class()
    assert adapter.main() == 7
    assert capsys.readouterr().err.startswith("error: lm-eval is not installed (lm_eval")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    pytest.importorskip("lm_eval")
    world = make_world(tmp_path_factory.mktemp("lm") / "world", ("naive-int2",))
    world.pack("naive-int2", world.folder / "it.kvcq")
    return world


def evaluate(world: World, folder: Path, kind: str, more: str, *words: str) -> Any:
    data = folder / "data.jsonl"
    texts = ["the island stone river then and in other answer " * 3 + str(n) * n for n in range(1, 7)]
    data.write_text("\n".join(json.dumps({"text": text, "answer": "a"}) for text in texts))
    (folder / "echo.yaml").write_text(TASK.format(data=data, kind=kind, more=more))
    arguments = f"pretrained={world.model},bundle={world.folder / 'it.kvcq'}"
    return python(
        "-m", "kvcq.runtime.hf.lm_eval", "run", "--model", "kvcq", "--model_args", arguments, "--tasks", "echo",
        "--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples", *words,
        HF_HUB_OFFLINE="1", HF_HOME=str(folder / "hub"), HF_DATASETS_OFFLINE="1",
    )  # fmt: skip


def answers(folder: Path) -> dict[str, str]:
    (file,) = (folder / "out").rglob("samples_echo*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["doc"]["text"]: row["resps"][0][0] for row in rows}


@pytest.mark.slow
def test_generations_are_those_of_the_cache_whatever_the_batch(world: World, tmp_path: Path) -> None:
    import torch

    from kvcq.models.load import load_model
    from kvcq.runtime.hf.load import load_cache

    found = []
    for batch in ("1", "3"):
        (folder := tmp_path / batch).mkdir()
        done = evaluate(world, folder, "generate_until", GENERATE, "--batch_size", batch)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        found.append(answers(folder))
        (results,) = (folder / "out").rglob("results*.json")
        about = json.loads(results.read_text())["config"]
        assert about["kvcq_mode"] == "packed" and about["kvcq_bundle"].endswith("it.kvcq")
    assert len(found[0]) == 6 and found[0] == found[1]
    loaded = load_model(str(world.model), device="cpu")
    differs = 0
    for text, answer in found[0].items():
        prompt = loaded.tokenizer(text, return_tensors="pt")
        exact = loaded.model.generate(**prompt, max_new_tokens=12, do_sample=False)
        with load_cache(world.folder / "it.kvcq", loaded) as cache, torch.no_grad():
            own = loaded.model.generate(**prompt, max_new_tokens=12, do_sample=False, past_key_values=cache)
        start = prompt["input_ids"].shape[1]
        wanted = loaded.tokenizer.decode(own[0, start:], skip_special_tokens=True).split("\n")[0]
        assert answer == wanted
        differs += not torch.equal(own, exact)
    assert differs  # the tiny model is hurt by two bits, or this compared nothing


@pytest.mark.slow
def test_loglikelihood_tasks_are_refused_with_the_reason(world: World, tmp_path: Path) -> None:
    done = evaluate(world, tmp_path, "multiple_choice", SCORE)
    assert done.returncode == 2
    assert b"error: loglikelihoods are scored in one pass that reads no cache: echo" in done.stderr
