"""A sweep: every point measures as its real fit would, refusals come before any work, and nothing is left behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvcq.artifacts.report_file import read_report
from kvcq.artifacts.stats_file import read_stats
from kvcq.errors import InputError, KvcqError
from kvcq.pipeline import sweep as module
from kvcq.pipeline.grid import MAX_POINTS
from kvcq.pipeline.inspect import verify
from kvcq.pipeline.pack import pack
from kvcq.pipeline.requests import FitRequest, PackRequest, SweepRequest, ValidateRequest
from kvcq.pipeline.result import Answer
from kvcq.pipeline.sweep import sweep
from kvcq.pipeline.validate import ValidateResult
from tests.chain import World, make_world

SMALL = ("windows.sink=4", "windows.recent=8")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("sweep") / "world", ("oscar",))


def asked(world: World, out: Path, *axes: str, **options: Any) -> SweepRequest:
    defaults: dict[str, Any] = {
        "stats": world.stats, "method": "oscar", "model": str(world.model), "data": (str(world.held_out),),
        "contexts": (96,), "queries": 16, "settings": SMALL,
    }  # fmt: skip
    return SweepRequest(out=out, sweep=axes, **defaults | options)


@pytest.fixture(scope="module")
def grid(small: World) -> ValidateResult:
    request = asked(
        small, small.folder / "grid", "windows=0/0,4/8", "clip=0.8,1.0", artifacts=(small.fits["oscar"],),
        tasks=("attention", "perplexity"), chunk=32, settings=("groups=1",),
    )  # fmt: skip
    result = sweep(request)
    assert isinstance(result, ValidateResult)
    return result


def test_the_grid_is_whole_and_the_last_axis_varies_fastest(small: World, grid: ValidateResult) -> None:
    record = grid.report.sweep
    assert record is not None
    assert [point.values for point in record.points] == [
        ("0/0", "0.8"), ("0/0", "1.0"), ("4/8", "0.8"), ("4/8", "1.0"),
    ]  # fmt: skip
    names = [row.name for row in grid.report.artifacts]
    assert names == ["bf16 reference", *(point.artifact for point in record.points), "oscar"]
    assert names[3] == "oscar[windows=4/8,clip=0.8]"
    recipe = record.points[2].recipe
    assert (recipe.windows.sink, recipe.windows.recent) == (4, 8)
    assert recipe.params["clip_k"] == recipe.params["clip_v"] == 0.8
    assert record.stats_digest == read_stats(small.stats).digest and record.settings == ("groups=1",)


def test_the_report_is_an_artifact_that_reads_back(small: World, grid: ValidateResult) -> None:
    found = read_report(small.folder / "grid")
    assert found.report == grid.report
    assert 'id="sweep"' in found.page and "oscar[windows=4/8,clip=0.8]" in found.page
    assert str(small.folder) not in grid.report.command
    assert grid.report.command.startswith(
        "kvcq validate oscar --stats stats --method oscar --set groups=1 --sweep windows=0/0,4/8 --sweep clip=0.8,1.0 "
        "--model model"
    )
    assert all(row.tasks is not None and row.tasks.perplexity for row in grid.report.artifacts)


def test_a_point_measures_as_its_real_fit(small: World, grid: ValidateResult, tmp_path: Path) -> None:
    real = small.fit(tmp_path / "real", "oscar", "clip_k=0.8", "clip_v=0.8")
    own = small.validate(tmp_path / "report", real, contexts=(96,), tasks=("attention", "perplexity"), chunk=32)
    row, point = own.report.artifacts[1], grid.report.artifacts[3]
    different = {"name": "real", "canary": row.canary}
    assert point.model_copy(update=different) == row


def test_no_point_has_a_canary_and_the_artifacts_beside_have(
    small: World, grid: ValidateResult, tmp_path: Path
) -> None:
    *points, beside = grid.report.artifacts[1:]
    assert all(row.canary is None for row in points) and beside.canary is not None
    same = small.fit(tmp_path / "same", "oscar", "clip_k=0.8", "clip_v=0.8")
    with pytest.raises(KvcqError, match="the report does not cover this fit"):
        pack(PackRequest(fit=same, report=small.folder / "grid", out=tmp_path / "it.kvcq"))


def test_a_fit_beside_the_sweep_packs_even_where_a_point_equals_it(small: World, tmp_path: Path) -> None:
    sweep(asked(small, tmp_path / "it", "windows=0/0,4/8", artifacts=(small.fits["oscar"],)))
    found = pack(PackRequest(fit=small.fits["oscar"], report=tmp_path / "it", out=tmp_path / "real.kvcq"))
    rows = read_report(tmp_path / "it").report.artifacts
    assert rows[2].tensors_digest == rows[3].tensors_digest == found.manifest.tensors_digest
    assert verify(tmp_path / "real.kvcq").record["kind"] == "bundle"


def test_seeds_parameters_and_layers_are_swept_too(small: World, tmp_path: Path) -> None:
    cheap = (*SMALL, "rows=256", "iterations=1")
    result = sweep(asked(small, tmp_path / "it", "partition=deal,sorted", "seed=0,1", method="nova", settings=cheap))
    assert isinstance(result, ValidateResult)
    digests = {row.tensors_digest for row in result.report.artifacts[1:]}
    assert len(digests) == 4
    layers = sweep(asked(small, tmp_path / "layers", "skip_layers=none,0+2"))
    assert isinstance(layers, ValidateResult)
    assert [row.quantized_layers for row in layers.report.artifacts[1:]] == [(0, 1, 2, 3), (1, 3)]


def test_a_recipe_file_is_the_base_of_every_point(small: World, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("method: oscar\nwindows: {sink: 2, recent: 6}\nparams: {clip_v: 0.7}\n")
    request = asked(small, tmp_path / "it", "clip_k=0.9,1.0", recipe=recipe, method=None, settings=(), dry_run=True)
    answer = sweep(request)
    assert isinstance(answer, Answer)
    for point in answer.record["points"]:
        assert point["recipe"]["windows"] == {"sink": 2, "recent": 6} and point["recipe"]["params"]["clip_v"] == 0.7


def test_a_dry_run_lists_the_points_and_neither_fits_nor_loads(small: World, tmp_path: Path) -> None:
    answer = sweep(asked(small, tmp_path / "it", "windows=0/0,4/8", model="nowhere/at-all", dry_run=True))
    assert isinstance(answer, Answer)
    assert "2 points" in answer.text() and "oscar[windows=4/8]" in answer.text() and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("axes", "options", "says"),
    [
        (("windws=0/0",), {}, "did you mean 'windows'"),
        (("clip_kk=0.9",), {}, "did you mean 'clip_k'"),
        (("rows=256",), {}, "oscar has nothing called 'rows' to sweep"),
        (("clip=0.9",), {"method": "bf16"}, "bf16 has nothing called 'clip' to sweep"),
        (("windows=64",), {}, "'64' is not SINK/RECENT"),
        (("windows=-1/4",), {}, "is not SINK/RECENT"),
        (("clip=0.9,high",), {}, "clip_k='high' is not allowed (--sweep clip=high)"),
        (("clip=0.9,2.0",), {}, "--sweep clip=2.0"),
        (("method=oscar,nova",), {}, "a sweep varies one method"),
        (("windows",), {}, "is not key=v1,v2"),
        (("windows=",), {}, "is not key=v1,v2"),
        (("=1",), {}, "is not key=v1,v2"),
        (("clip=0.9,0.9",), {}, "given twice"),
        (("clip=0.9", "clip=0.8"), {}, "swept twice"),
        (("clip=0.9", "clip_v=0.8"), {}, "two swept keys set clip_v"),
        ((), {}, "nothing to sweep"),
        (("seed=" + ",".join(map(str, range(MAX_POINTS + 1))),), {}, f"has {MAX_POINTS + 1} points"),
        (("clip=0.9",), {"method": None}, "no method given"),
        (("clip=0.9",), {"method": "osca"}, "did you mean 'oscar'"),
        (("skip_layers=none,9",), {}, "no layer 9 (oscar[skip_layers=9]"),
        (("target_context=1k",), {}, "beyond the model's 512 positions"),
        (("windows=0/0,16/64",), {}, "oscar[windows=16/64], --contexts"),
        (("clip=0.9",), {"tasks": ("perplexty",)}, "did you mean perplexity"),
    ],
)
def test_refusals_come_before_the_model_is_loaded(
    small: World, tmp_path: Path, axes: tuple[str, ...], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError) as caught:
        sweep(asked(small, tmp_path / "it", *axes, **{"model": "nowhere/at-all", **options}))
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("method", "target", "fits"), [("oscar", None, 2), ("oscar", 128, 4), ("kivi", None, 4)], ids=str
)
def test_windows_that_no_part_of_a_fit_reads_cost_no_fit(
    small: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, target: int | None, fits: int
) -> None:
    made: list[str] = []
    real = module.fit_layers

    def count(*arguments: Any) -> Any:
        made.append(arguments[1].method)
        return real(*arguments)

    monkeypatch.setattr(module, "fit_layers", count)
    settings = () if method == "oscar" else ("group_tokens=4",)
    request = asked(
        small, tmp_path / "it", "windows=2/8,4/16", "seed=0,1", method=method, settings=settings, target_context=target
    )
    result = sweep(request)
    assert isinstance(result, ValidateResult) and len(made) == fits
    rows = result.report.artifacts[1:]
    assert [(row.windows.sink, row.windows.recent) for row in rows] == [(2, 8), (2, 8), (4, 16), (4, 16)]
    assert rows[0].contexts != rows[2].contexts


def test_a_failing_fit_names_its_point(small: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise InputError("too few rows", where="layer 3", fix="collect more")

    monkeypatch.setattr(module, "fit_layers", fail)
    with pytest.raises(InputError, match=r"too few rows \(oscar\[clip=0\.9\], layer 3\): collect more"):
        sweep(asked(small, tmp_path / "it", "clip=0.9,1.0"))


@pytest.mark.parametrize("step", ["fit_layers", "measure"])
def test_an_interrupt_leaves_nothing(small: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        sweep(asked(small, tmp_path / "it", "clip=0.9,1.0"))
    assert not list(tmp_path.iterdir())


def test_the_output_replaces_neither_inputs_nor_other_kinds(small: World, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exists"):
        sweep(asked(small, small.folder / "report", "clip=0.9"))
    with pytest.raises(InputError, match="would replace the input"):
        sweep(asked(small, small.stats, "clip=0.9", force=True))
    with pytest.raises(InputError, match="holds fit, not report"):
        sweep(asked(small, small.fits["oscar"], "clip=0.9", force=True))


def test_a_request_of_a_sweep_has_all_fields_of_validate() -> None:
    own = {field.name for field in dataclasses.fields(SweepRequest)}
    assert {field.name for field in dataclasses.fields(ValidateRequest)} < own
    assert {"stats", "method", "recipe", "settings", "target_context"} <= own & {
        field.name for field in dataclasses.fields(FitRequest)
    }
