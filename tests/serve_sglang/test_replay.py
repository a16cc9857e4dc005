"""What several replays of one server found, taken together; the answers that a soak keeps."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from tests.scripts import load_benchmark


def found_of(replay, numbers, values):
    """What a process found of some answers: the server is off by `values`, its replay by twice that."""
    found = replay.Found()
    reference = torch.tensor([[0.7, 0.3]]).log().expand(len(values), 2)
    for tally, times in zip(found.sides.values(), (1, 2), strict=True):
        off = reference[:, 1] + times * torch.tensor(values)
        tally.join(replay.Tally.of(reference, off, torch.ones(len(values), dtype=torch.long), torch.tensor([1])))
    found.numbers, found.counts["retracted"] = list(numbers), 1
    found.cuts["chunks cut elsewhere"] = [0.25]
    return found


def test_shards_are_pooled_as_one_process_would_print_them(monkeypatch, tmp_path, capsys):
    replay = load_benchmark(monkeypatch, "serve_replay")
    paths = []
    for index, (numbers, values) in enumerate((((0, 2), [0.1, -0.3]), ((1,), [0.2]))):
        paths.append(tmp_path / f"{index}.json")
        paths[-1].write_text(json.dumps({"cold": found_of(replay, numbers, values).plain()}))
    replay.pool(SimpleNamespace(found=paths))
    server, other, cut = capsys.readouterr().out.splitlines()
    gap = "by 0.847 nats in the mean, 0.847 at most"
    end = "3 answers, 2 retracted, 0 not replayed"
    assert (
        server == f"cold | server | mean 0.2000 p99 0.300 max 0.300 nats; 2 of 2 tokens chosen otherwise, {gap} | {end}"
    )
    assert "mean 0.4000" in other and "max 0.600" in other
    assert cut.endswith("chunks cut elsewhere: mean 0.2500, max 0.2500, 2 prompts")


def test_an_answer_is_not_counted_twice(monkeypatch, tmp_path):
    replay = load_benchmark(monkeypatch, "serve_replay")
    path = tmp_path / "0.json"
    path.write_text(json.dumps({"cold": found_of(replay, (0, 3), [0.1]).plain()}))
    with pytest.raises(SystemExit, match=r"0.json: cold: answers \[0, 3\] are counted already"):
        replay.pool(SimpleNamespace(found=[path, path]))


def test_a_soak_writes_what_it_keeps_as_it_goes(monkeypatch, tmp_path):
    soak_sglang = load_benchmark(monkeypatch, "soak_sglang")
    out = tmp_path / "soak.json"
    out.write_text("of a former soak")
    soak = soak_sglang.Soak.__new__(soak_sglang.Soak)
    soak.options, soak.answers, soak.saved = SimpleNamespace(out=out, name="s"), [], -1
    soak.lock, soak.faults = soak_sglang.threading.Lock(), Counter()
    for answers in ([], [{"rid": "a"}], [{"rid": "a"}, {"rid": "b"}]):
        soak.answers = answers
        soak.save()
        assert json.loads(out.read_text()) == {"name": "s", "answers": answers}
    assert [path.name for path in tmp_path.iterdir()] == ["soak.json"]
    soak.answers, soak.options.out = [{}], tmp_path / "gone" / "soak.json"
    soak.save()
    assert len(soak.faults) == 1 and "answers are not written" in next(iter(soak.faults))
