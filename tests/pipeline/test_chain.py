"""The whole chain for every method of the registry: what is made holds together, and repeats byte for byte."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcq.artifacts.bundle import open_bundle
from kvcq.artifacts.fit_file import read_fit
from kvcq.artifacts.report_file import read_report
from kvcq.artifacts.stats_file import read_stats
from kvcq.errors import InputError
from kvcq.methods import registry
from kvcq.pipeline.inspect import inspect, verify
from tests.chain import CHEAP, CONTEXTS, WINDOWS, World, bare_environment, contents

METHODS = registry.available()
QUANTIZING = [name for name in METHODS if registry.load(name).quantizes]
SERVED = [name for name in METHODS if registry.load(name).unserved is None]


def test_stats_describe_the_run_without_machine_paths(world: World) -> None:
    header = read_stats(world.stats).header
    assert header.tokens == 768 and header.longest == 128 and len(header.sequences) == 6 and len(header.probe) == 2
    assert header.data.sources == ("calibration.txt",) and header.provenance.source == "model"
    assert all(layer.unrotates for layer in header.geometry.layers)
    assert str(world.folder) not in (world.stats / "stats.json").read_text()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_fitted_measured_and_described(world: World, method: str) -> None:
    header = read_fit(world.fits[method]).header
    rows = {row.name: row for row in read_report(world.report).report.artifacts}
    row = rows[method]
    quantized = method in QUANTIZING
    assert [entry.quantized for entry in header.plan] == [quantized] * 4
    assert (header.recipe.windows.sink, header.recipe.windows.recent) == (4, 8)
    assert set(header.recipe.params) == {item.name for item in dataclasses.fields(registry.load(method))}
    assert [entry.context for entry in row.contexts] == list(CONTEXTS)
    assert row.tensors_digest == header.tensors_digest and (row.canary is not None) == quantized
    kl = row.contexts[-1].metrics.kl
    exact = rows["bf16 reference"].contexts[-1].metrics.kl
    assert (20 * exact < kl < 1.0) if quantized else kl == exact
    assert "method" in inspect(world.fits[method]).text()


def test_report_compares_all_methods_and_better_ones_win(world: World) -> None:
    report = read_report(world.report).report
    assert [row.name for row in report.artifacts] == ["bf16 reference", *METHODS]
    kl = {row.name: row.contexts[-1].metrics.kl for row in report.artifacts}
    assert kl["nova"] < kl["naive-int2"]
    page = (world.report / "report.html").read_text()
    assert all(name in page for name in METHODS)
    assert str(world.folder) not in (world.report / "report.json").read_text()


@pytest.mark.parametrize("archive", [False, True], ids=["folder", "archive"])
@pytest.mark.parametrize("method", SERVED)
def test_bundles_of_every_served_method_verify_in_both_forms(
    world: World, tmp_path: Path, method: str, archive: bool
) -> None:
    out = world.pack(method, tmp_path / "it.kvcq", archive=archive)
    answer = verify(out)
    assert answer.record["kind"] == "bundle" and answer.record["archive"] is archive
    bundle = open_bundle(out)
    assert bundle.manifest.digest == answer.record["digest"]
    assert bundle.manifest.tensors_digest == read_fit(world.fits[method]).header.tensors_digest
    assert bundle.row.name == method and bundle.canary["tokens"].shape == (3, 204)
    assert method in bundle.card


def test_bundles_measure_like_their_fits(world: World, tmp_path: Path) -> None:
    bundle = world.pack("oscar", tmp_path / "again.kvcq", archive=True)
    result = world.validate(tmp_path / "report", world.fits["oscar"], bundle, canary=())
    exact, first, second = result.report.artifacts
    assert (first.name, second.name) == ("oscar", "again")
    assert first.contexts == second.contexts and first.layers == second.layers and first.bits == second.bits
    assert exact.contexts[0].metrics.kl < first.contexts[0].metrics.kl


def test_fit_that_quantizes_nothing_is_not_packed(world: World, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="quantizes no layer"):
        world.pack("bf16", tmp_path / "it.kvcq")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", sorted(set(QUANTIZING) - set(SERVED)))
def test_fit_for_accuracy_only_is_not_packed_and_the_reason_is_said(world: World, tmp_path: Path, method: str) -> None:
    with pytest.raises(InputError, match=f"for accuracy only: {registry.load(method).unserved}"):
        world.pack(method, tmp_path / "it.kvcq")
    assert not list(tmp_path.iterdir())


def test_collect_repeats_byte_for_byte(world: World, tmp_path: Path) -> None:
    assert contents(world.collect(tmp_path / "again")) == contents(world.stats)


def test_validate_repeats_the_sealed_files_byte_for_byte(world: World, tmp_path: Path) -> None:
    world.validate(tmp_path / "report", *world.fits.values())
    first, second = contents(world.report), contents(tmp_path / "report")
    assert first.keys() == second.keys()
    # run.json holds the seconds, and is not sealed.
    assert {name for name in first if first[name] != second[name]} <= {"run.json"}


REPEAT = """
import json, sys
from pathlib import Path
import torch
from kvcq.pipeline.fit import fit
from kvcq.pipeline.pack import pack
from kvcq.pipeline.requests import FitRequest, PackRequest

plan = json.loads(sys.argv[1])
torch.set_num_threads(plan["threads"])
out = Path(plan["out"])
for method, settings in plan["methods"].items():
    fit(FitRequest(stats=Path(plan["stats"]), out=out / method, method=method, settings=tuple(settings)))
    target = out / f"{method}-target"
    fit(FitRequest(stats=Path(plan["stats"]), out=target, method=method, settings=tuple(settings), target_context=400))
    if method in plan["served"]:
        pack(PackRequest(fit=out / method, report=Path(plan["report"]), out=out / f"{method}.kvcq"))
"""


def test_fit_and_pack_give_the_same_bytes_at_any_thread_count(world: World, tmp_path: Path) -> None:
    """Two processes, one with 1 and one with 2 threads, against this process: the third repetition of each fit."""
    running = []
    for threads in (1, 2):
        plan = {
            "threads": threads,
            "out": str(tmp_path / str(threads)),
            "stats": str(world.stats),
            "report": str(world.report),
            "served": SERVED,
            "methods": {method: [*WINDOWS, *CHEAP.get(method, ())] for method in METHODS},
        }
        environment = bare_environment(OMP_NUM_THREADS=str(threads))
        running.append(subprocess.Popen([sys.executable, "-c", REPEAT, json.dumps(plan)], env=environment))
    assert [process.wait(120) for process in running] == [0, 0]
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    for method in METHODS:
        assert contents(tmp_path / "1" / method) == contents(world.fits[method])
    assert contents(tmp_path / "1" / "nova.kvcq") == contents(world.folder / "nova.kvcq")
