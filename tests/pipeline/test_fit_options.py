"""Recipes and settings resolve to one recipe; layers and target context do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcq.artifacts.fit_file import read_fit
from kvcq.errors import InputError
from kvcq.methods import registry
from kvcq.pipeline.fit import fit
from kvcq.pipeline.recipes import apply_settings, load_recipe, resolve
from kvcq.pipeline.requests import FitRequest
from tests.chain import WINDOWS, World, contents

RECIPE = """
method: oscar
params: {clip_k: 0.9, groups: 4}
windows: {sink: 2, recent: 6}
skip_layers: [3]
seed: 7
"""


class Listener:
    """Keeps what a verb tells."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.stages: list[str] = []
        self.notes: list[str] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def advance(self, done: int, total: int, unit: str) -> None:
        assert 0 < done <= total and unit

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def fitted(world: World, out: Path, **options: object) -> object:
    fit(FitRequest(stats=world.stats, out=out, **options))  # type: ignore[arg-type]
    return read_fit(out).header


def test_settings_override_the_recipe_and_all_defaults_are_recorded(world: World, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    header = fitted(
        world,
        tmp_path / "fit",
        recipe=tmp_path / "recipe.yaml",
        settings=("clip_k=0.8", "windows.recent=9", "skip_layers=0,2"),
    )
    recipe = header.recipe
    assert (recipe.method, recipe.seed, recipe.skip_layers) == ("oscar", 7, (0, 2))
    assert (recipe.windows.sink, recipe.windows.recent) == (2, 9)
    assert recipe.params == registry.create("oscar", {"clip_k": 0.8, "groups": 4}).__dict__
    assert [entry.reason for entry in header.plan] == ["skipped by the recipe", None, "skipped by the recipe", None]
    assert header.plan[1].k.clip == 0.8 and header.plan[1].k.groups == 4
    assert not any(entry.name.startswith(("layers.0.", "layers.2.")) for entry in header.tensors)


def test_method_flag_drops_the_parameters_of_another_method(world: World, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    header = fitted(world, tmp_path / "fit", recipe=tmp_path / "recipe.yaml", method="naive-int2")
    assert header.recipe.method == "naive-int2" and header.recipe.windows.sink == 2
    assert header.recipe.params == registry.create("naive-int2").__dict__


def test_recorded_recipe_reproduces_the_fit(world: World, tmp_path: Path) -> None:
    first = fitted(world, tmp_path / "a", method="oscar", settings=(*WINDOWS, "skip_layers=1", "seed=5"))
    import yaml

    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(first.recipe.plain()))
    fitted(world, tmp_path / "b", recipe=tmp_path / "recipe.yaml")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("method: [", "not YAML"),
        ("- oscar", "mapping of fields"),
        ("", "mapping of fields"),
        ("method: oscar\nwindow: {sink: 3}", "did you mean 'windows'"),
        ("method: oscar\nwindows: 64", "windows"),
        ("method: oscar\nwindows: {sinks: 3}", "did you mean 'sink'"),
        ("method: oscar\nparams: [clip_k]", "params"),
        ("method: oscar\nparams: {clipk: 1}", "did you mean 'clip_k'"),
        ("method: oscar\nskip_layers: 3", "skip_layers"),
        ("method: oscar\nskip_layers: [x]", "skip_layers"),
        ("method: oscar\nseed: -1", "seed"),
        ("method: oskar", "did you mean 'oscar'"),
        ("method: 3", "no method given"),
        ("windows: {sink: 3}", "no method given"),
        ("method: oscar\nwindows: {sink: -3}", "windows.sink"),
        ("method: oscar\nparams: {clip_k: high}", "clip_k='high' is not allowed"),
        ("method: oscar\nparams: {3: 4}", "no parameter 3"),
        ("3: 4", "unknown recipe field"),
    ],
)
def test_bad_recipes_are_refused_with_the_field(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        resolve(apply_settings(load_recipe(path), ()), path)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("clip_k", "not key=value"),
        ("=3", "not key=value"),
        ("clip_k=[", "cannot read the value"),
        ("clip_k=[1, 2]", "clip_k"),
        ("skip_layers=a", "not a list of layer ids"),
        ("skip_layers=²", "not a list of layer ids"),
        ("skip_layers=9", "no layer 9"),
        ("windows=3", "windows"),
        ("windows.sinks=3", "did you mean 'sink'"),
        ("params=3", "params"),
        ("target_context=3", "inside the 4 sink tokens"),
        ("groups=3", "does not divide"),
        ("seed=2020-13-45", "cannot read the value"),
        ("windows.sink=2020-01-01", "windows.sink"),
        ("clipk=3", "did you mean 'clip_k'"),
    ],
)
def test_bad_settings_are_refused(world: World, tmp_path: Path, setting: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        world.fit(tmp_path / "fit", "oscar", setting)
    assert says in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_unreadable_recipe_is_refused(world: World, tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(InputError, match="cannot read the recipe"):
            fit(FitRequest(stats=world.stats, out=tmp_path / "fit", recipe=path))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError):
        load_recipe(tmp_path / "bytes.yaml")


def test_target_context_changes_the_fit_and_is_recorded(world: World, tmp_path: Path) -> None:
    plain = read_fit(world.fits["oscar"]).header
    world.fit(tmp_path / "far", "oscar", target_context=384)
    far = read_fit(tmp_path / "far").header
    assert (plain.target_context, far.target_context) == (128, 384) and far.collected_context == 128
    assert far.tensors_digest != plain.tensors_digest
    assert any("twice the collected length" in line for line in far.warnings)
    world.fit(tmp_path / "same", "oscar", "target_context=384")
    assert contents(tmp_path / "same") == contents(tmp_path / "far")


def test_validate_warns_beyond_the_target_context(world: World, tmp_path: Path) -> None:
    result = world.validate(tmp_path / "report", world.fits["oscar"], canary=())
    assert any("160" in line and "128" in line for line in result.report.artifacts[1].warnings)


def test_dry_run_writes_nothing(world: World, tmp_path: Path) -> None:
    result = fit(FitRequest(stats=world.stats, out=tmp_path / "fit", method="nova", dry_run=True))
    assert result.path is None and result.recipe.params["codebook"] == "int8" and "nothing written" in result.text()
    world.collect(tmp_path / "stats", dry_run=True)
    assert world.validate(tmp_path / "report", world.fits["nova"], dry_run=True).path is None
    world.pack("nova", tmp_path / "it.kvcq", dry_run=True)
    assert not list(tmp_path.iterdir())


def test_progress_is_told_stage_by_stage(world: World, tmp_path: Path) -> None:
    listener = Listener()
    fit(FitRequest(stats=world.stats, out=tmp_path / "fit", method="oscar", target_context=500), listener)
    assert listener.stages == ["reading statistics stats", "fitting oscar"] and "exceeds twice" in listener.warnings[-1]
