"""Tasks on the command line: flags reach the report, the recorded command repeats it, mistakes and gates exit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcq.cli.main import execute
from kvcq.errors import Interrupted
from kvcq.pipeline import runners as runners_module
from tests.chain import World


def words(world: World, out: Path, *more: str) -> list[str]:
    line = ["validate", str(world.fits["oscar"]), "--model", str(world.model), "--data", str(world.held_out)]
    return [*line, "--out", str(out), "--contexts", "160", "--no-canary", *more]


def measured(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert execute([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["report"]


def test_flags_reach_the_report_and_its_command_repeats_the_numbers(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--tasks", "perplexity,needle,agreement,decode-kl", "--semantics", "served", "--chunk", "48"]
    flags += ["--cached-at", "40", "--new-tokens", "3", "--decode-steps", "2", "--needle-tasks", "single_1,single_2"]
    flags += ["--needle-lengths", "480", "--needle-depths", "10,90", "--needle-items", "1", "--seed", "5"]
    report = measured(capsys, words(world, tmp_path / "a", *flags, "--cache", "simulate"))
    settings, command = report["tasks"], report["command"].split()
    assert (report["semantics"], report["chunk"], report["cached_at"], settings["seed"]) == ("served", 48, 40, 5)
    assert settings["needle"]["contexts"] == [480] and settings["needle"]["depths"] == [10.0, 90.0]
    assert settings["agreement"]["new_tokens"] == 3 and settings["decode_kl"]["steps"] == 2
    assert report["artifacts"][1]["tasks"]["cache"] == "simulate"
    where = {"oscar": str(world.fits["oscar"]), "model": str(world.model), "heldout.txt": str(world.held_out)}
    again = [where.get(word, word) for word in command[1:]]
    repeated = measured(capsys, [*again, "--out", str(tmp_path / "b"), "--no-canary"])
    assert repeated["artifacts"] == report["artifacts"] and repeated["pairs"] == report["pairs"]


def test_a_gate_on_perplexity_decides_the_exit_code(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gates = tmp_path / "gates.yaml"
    gates.write_text("gates: [{metric: perplexity_ratio, max: 0.5}]")
    code = execute(words(world, tmp_path / "r", "--tasks", "perplexity", "--gates", str(gates)))
    assert code == 3 and "perplexity_ratio" in capsys.readouterr().err
    assert (tmp_path / "r" / "report.json").exists()


def test_a_run_of_tasks_ends_with_the_command_that_goes_on_with_lm_eval(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = words(world, tmp_path / "a", "--tasks", "perplexity", "--chunk", "80")
    bundle = [str(world.folder / "nova.kvcq") if word == str(world.fits["oscar"]) else word for word in fit]
    found = []
    for number, arguments in enumerate((fit, bundle)):
        arguments[arguments.index("--out") + 1] = str(tmp_path / str(number))
        assert execute(arguments) == 0
        found.append(capsys.readouterr().err.splitlines()[-1])
    start = "python -m kvcq.runtime.hf.lm_eval run --model kvcq --model_args"
    assert f"{start} pretrained={world.model},bundle=NAME.kvcq --tasks gsm8k" in found[0]
    assert f"{start} pretrained={world.model},bundle={world.folder / 'nova.kvcq'} --tasks gsm8k" in found[1]


@pytest.mark.parametrize(
    "flags, says",
    [
        (("--tasks", "needles"), "'needles' is not known (--tasks): did you mean needle?"),
        (("--tasks", "needle", "--needle-depths", "0,half"), "'half' is not a number (--needle-depths)"),
        (("--tasks", "needle", "--needle-lengths", "4q"), "'4q' is not a number of tokens (--needle-lengths)"),
        (("--tasks", "needle", "--needle-tasks", "multikey_9"), "(--needle-tasks): did you mean multikey_"),
        (("--semantics", "query"), "(--semantics)"),
    ],
)
def test_bad_task_flags_end_with_2(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], says: str
) -> None:
    assert execute(words(world, tmp_path / "r", *flags)) == 2
    out, err = capsys.readouterr()
    assert not out and says in err.splitlines()[-1] and not (tmp_path / "r").exists()


@pytest.mark.parametrize("fault, code", [(RuntimeError("lost"), 1), (Interrupted(2), 130), (MemoryError(), 6)])
def test_a_run_that_fails_or_is_interrupted_writes_nothing(
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
    code: int,
) -> None:
    def extend(*_: object) -> None:
        raise fault

    monkeypatch.setattr(runners_module.CacheSession, "extend", extend)
    assert execute(words(world, tmp_path / "r", "--tasks", "perplexity")) == code
    assert list(tmp_path.iterdir()) == [] and "Traceback" not in capsys.readouterr().err
