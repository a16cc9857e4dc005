from importlib import metadata
from subprocess import CompletedProcess

import pytest

from kvcq.errors import MismatchError, UnavailableError
from kvcq.runtime.sglang import versions
from kvcq.runtime.sglang.versions import WINDOW, adapter, require
from tests.runtime.sglang import wheels
from tests.runtime.sglang.wheels import VERSIONS


@pytest.mark.parametrize(
    ("version", "way"),
    [
        ("0.5.13", "mixin"),
        ("0.5.13.post1", "mixin"),
        ("0.5.14", "mixin"),
        ("0.5.15", "mixin"),
        ("0.5.15.post1", "mixin"),
        ("0.5.15.post1+cu130", "mixin"),
        ("0.5.16", "configurator"),
        ("0.5.17", "configurator"),
        ("0.5.17.post2", "configurator"),
    ],
)
def test_a_release_of_the_window_has_its_adapter(version, way):
    assert adapter(version) == way


@pytest.mark.parametrize("version", ["0.5.12.post1", "0.5.18", "0.6.0", "0.5.9", "1.0.0", "0.4.17"])
def test_a_release_outside_the_window_is_refused_by_name(version):
    with pytest.raises(MismatchError, match=r"outside the supported releases") as caught:
        adapter(version)
    assert caught.value.exit_code == 5
    assert version in str(caught.value) and WINDOW in str(caught.value) and "--engine hf" in str(caught.value)


@pytest.mark.parametrize(
    "version", ["0.5.15rc1", "0.5.16.dev20260101", "main", "", "0.5", "0.5.15.post1.dev3", "v0.5.15"]
)
def test_what_is_not_a_release_is_refused(version):
    with pytest.raises(MismatchError, match=r"not a release that kvcq knows.*--engine hf"):
        adapter(version)


def test_the_window_of_the_package_is_the_window_of_the_plugin():
    required = [line for line in metadata.requires("kvcq") if line.startswith("sglang")]
    assert len(required) == 1
    bounds = required[0].partition(";")[0].removeprefix("sglang").replace(" ", "")
    assert sorted(bounds.split(",")) == sorted(WINDOW.split(","))


def test_the_tested_release_is_a_wheel_of_the_tests():
    assert versions.TESTED in VERSIONS


def test_without_sglang_the_line_names_how_to_get_it_and_the_other_engine(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda: None)
    with pytest.raises(UnavailableError, match=r"not installed.*kvcq\[sglang\].*--engine hf") as caught:
        require()
    assert caught.value.exit_code == 7


def test_an_installed_release_is_looked_up_without_importing_it(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: {"sglang": "0.5.15.post1"}[name])
    assert require() == "0.5.15.post1"
    monkeypatch.setattr(metadata, "version", lambda name: {"sglang": "0.5.18"}[name])
    with pytest.raises(MismatchError):
        require()


def test_a_package_that_is_not_there_has_no_version(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert versions.installed() is None


def test_each_way_of_building_pools_is_the_one_that_the_release_has(sources):
    has = {
        "mixin": sources.has("sglang.srt.model_executor.model_runner_kv_cache_mixin"),
        "configurator": sources.has("sglang.srt.mem_cache.kv_cache_configurator"),
    }
    assert [way for way, there in has.items() if there] == [adapter(sources.version)]


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_wheel_that_cannot_be_fetched_skips_here_and_fails_in_ci(ci, outcome, tmp_path, monkeypatch):
    asked = []

    def refused(command, **_):
        asked.append(command[-1])
        return CompletedProcess(command, 1, "", "no route to host")

    monkeypatch.setattr(wheels, "CACHE", tmp_path)
    monkeypatch.setattr(wheels.subprocess, "run", refused)
    monkeypatch.setenv("CI", ci)
    wheels.fetch.cache_clear()
    for _ in range(2):
        with pytest.raises(outcome, match=r"SGLang 0\.5\.13 cannot be fetched: no route to host"):
            wheels.wheel("0.5.13")
    wheels.fetch.cache_clear()
    assert asked == ["sglang==0.5.13"]


def test_a_wheel_of_another_hash_is_not_read(tmp_path, monkeypatch):
    def swapped(command, **_):
        folder = command[command.index("-d") + 1]
        (tmp_path / folder / "sglang-0.5.13-cp312-cp312-manylinux_2_34_x86_64.whl").write_bytes(b"other")
        return CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(wheels, "CACHE", tmp_path)
    monkeypatch.setattr(wheels.subprocess, "run", swapped)
    wheels.fetch.cache_clear()
    with pytest.raises(AssertionError, match="another file"):
        wheels.wheel("0.5.13")
    wheels.fetch.cache_clear()
