"""kvcq validate --sweep on the command line: exit codes, one line a mistake, and the report in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcq.cli.main import execute
from tests.chain import World, make_world

Answer = tuple[int, str, str]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("cli") / "sweep", ("oscar",))


def call(world: World, capsys: pytest.CaptureFixture[str], out: Path, *words: object) -> Answer:
    capsys.readouterr()
    common = ("--model", world.model, "--data", world.held_out, "--contexts", 96, "--queries", 8, "--out", out, "-q")
    code = execute(["validate", *map(str, words), *map(str, common)])
    return (code, *capsys.readouterr())


def test_a_grid_ends_with_0_and_a_table(small: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--stats", small.stats, "--method", "oscar", "--sweep", "windows=0/0,4/8", "clip=0.8,1.0")
    code, out, err = call(small, capsys, tmp_path / "it", small.fits["oscar"], *words)
    assert code == 0, err
    table = out[out.index("Sweep (* best point)") : out.index("Bits per element")]
    assert [line.split()[:2] for line in table.splitlines()[3:7]] == [
        ["0/0", "0.8"], ["0/0", "1.0"], ["4/8", "0.8"], ["4/8", "1.0"],
    ]  # fmt: skip
    assert "Beside the sweep" in table and "oscar " in table
    assert (tmp_path / "it" / "report.html").exists()
    code, out, err = call(small, capsys, tmp_path / "it", *words, "--json", "--force")
    assert code == 0 and len(json.loads(out)["report"]["sweep"]["points"]) == 4


def test_a_dry_run_tells_the_points(small: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--stats", small.stats, "--method", "oscar", "--sweep", "windows=0/0,4/8", "--dry-run")
    code, out, err = call(small, capsys, tmp_path / "it", *words)
    assert code == 0 and out.startswith("dry run: 2 points") and not err and not (tmp_path / "it").exists()
    code, out, _ = call(small, capsys, tmp_path / "it", *words, "--json")
    assert [point["artifact"] for point in json.loads(out)["points"]] == ["oscar[windows=0/0]", "oscar[windows=4/8]"]


def test_a_failed_gate_of_a_point_ends_with_3(small: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gates = tmp_path / "gates.yaml"
    gates.write_text("gates:\n  - {metric: kl, context: max, max: 1.0e-9, artifacts: ['oscar[windows=4/8]']}\n")
    words = ("--stats", small.stats, "--method", "oscar", "--sweep", "windows=0/0,4/8", "--gates", gates)
    code, out, err = call(small, capsys, tmp_path / "it", *words)
    assert code == 3 and "1 of 1 gates failed" in err and "FAIL" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--sweep", "windws=0/0", "--method", "oscar", "--stats"), "did you mean 'windows'"),
        (("--sweep", "windows=0/0", "--method", "oscar", "clip_v=0.9,0.9", "--stats"), "given twice"),
        (("--sweep", "windows=0/0,64/256", "--method", "oscar", "--stats"), "oscar[windows=64/256]"),
        (("--sweep", "windows=0/0", "--method", "oscar", "--set", "x", "--stats"), "'x' is not key=value"),
        (("--sweep", "windows=0/0", "--method", "oscar", "--target-context", "soon", "--stats"), "--target-context"),
        (("--method", "oscar", "--stats"), "--stats is for sweeps"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    small: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    code, out, err = call(small, capsys, tmp_path / "it", *words, small.stats)
    assert (code, out) == (2, "") and err.count("\n") == 1 and says in err
    assert not (tmp_path / "it").exists()


def test_a_sweep_needs_statistics_and_is_no_matter_of_servers(
    small: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(small, capsys, tmp_path / "it", "--sweep", "windows=0/0", "--method", "oscar")
    assert code == 2 and "a sweep fits statistics (--sweep): add --stats" in err
    code = execute(["validate", "--sweep", "windows=0/0", "--server", "http://localhost:1", "--items", "x.jsonl"])
    assert code == 2 and "--sweep" in capsys.readouterr().err
