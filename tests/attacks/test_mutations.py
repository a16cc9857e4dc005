"""Two thousand mutated headers and recipes: every one is refused as a `KvcqError` in one line, or is harmless.

A mutation is sealed again, so that schema and meaning are tested and not only the digest; others are left unsealed.
What passes is used: described, drawn, fitted.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvcq.artifacts.bundle import Bundle
from kvcq.artifacts.fit_file import FitArtifact
from kvcq.artifacts.report_file import ReportArtifact
from kvcq.artifacts.stats_file import StatsArtifact
from kvcq.artifacts.verify import read_any
from kvcq.errors import KvcqError
from kvcq.evaluation.gates import load_gates
from kvcq.pipeline.fit import fit_layers
from kvcq.pipeline.inspect import inspect
from kvcq.pipeline.progress import SILENT
from kvcq.pipeline.recipes import apply_settings, load_recipe, resolve
from kvcq.pipeline.subjects import open_subjects
from kvcq.reports import bundle_card, manifest_text, render_html, report_text
from kvcq.runtime.layout import bits_per_element
from tests.attacks.mutation import as_bytes, edits, raw_bytes, render, sealed
from tests.chain import World, make_world

PLAN = {"kvcq.json": 500, "stats.json": 400, "fit.json": 150, "report.json": 150, "recipe": 400, "tensors": 400}
SECONDS = 2.0
LINE = 4096
OUTSIDE = ("unreadable", "altered", "not a JSON object", "not YAML")
done: Counter[str] = Counter()
inside: Counter[str] = Counter()


def mutations(name: str) -> Callable[..., None]:
    """Run the law once for each of the mutations that the plan gives to `name`."""
    return settings(
        max_examples=PLAN[name],
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # shrinking a slow case takes minutes and tells little
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> World:
    torch.set_num_threads(1)
    world = make_world(tmp_path_factory.mktemp("mutations") / "world", ("nova",), num_hidden_layers=2)
    world.pack("nova", world.folder / "it.kvcq")
    return world


def ends_well(name: str, use: Callable[[], object]) -> None:
    """Run `use`: it may succeed or raise a `KvcqError` of one printable line, and nothing else, in time."""
    done[name] += 1
    start = time.process_time()
    try:
        use()
        inside[name] += 1
    except KvcqError as error:
        line = str(error)
        inside[name] += not line.startswith(OUTSIDE)
        assert line.isprintable() and len(line) < LINE
        assert error.exit_code in (2, 4, 5, 6)
    assert time.process_time() - start < SECONDS


def exercise(path: Path) -> None:
    """Do with an artifact what every verb short of a model does."""
    artifact = read_any(path)
    answer = inspect(path)
    assert "\x1b" not in answer.text()
    json.dumps(answer.payload())
    if isinstance(artifact, Bundle):
        assert "\x1b" not in manifest_text(artifact.manifest) + bundle_card(artifact.manifest)
    elif isinstance(artifact, ReportArtifact):
        assert "\x1b" not in report_text(artifact.report) + render_html(artifact.report)
    elif isinstance(artifact, StatsArtifact):
        recipe, method = resolve({"method": "naive-int2", "target_context": 200, "seed": 1}, path)
        fit_layers(artifact, recipe, method, SILENT)
    if isinstance(artifact, Bundle | FitArtifact):
        for subject in open_subjects([path]):
            subject.codecs("cpu")
            bits_per_element(subject.plan, subject.geometry, subject.windows, 4096)


HEADERS = {"kvcq.json": "it.kvcq", "stats.json": "stats", "fit.json": "fits/nova", "report.json": "report"}


@pytest.mark.parametrize("name", HEADERS)
def test_mutated_headers_are_refused_or_harmless(chain: World, name: str) -> None:
    folder = chain.folder / HEADERS[name]
    original = (folder / name).read_bytes()
    document = json.loads(original)

    @mutations(name)
    @given(st.data())
    def law(data: st.DataObject) -> None:
        how = data.draw(st.sampled_from(("sealed", "sealed", "sealed", "unsealed", "bytes")))
        if how == "bytes":
            changed = data.draw(raw_bytes(original))
        else:
            edited = data.draw(edits(document))
            changed = sealed(edited) if how == "sealed" else as_bytes(render(edited)) + b"\n"
        (folder / name).write_bytes(changed)
        ends_well(name, lambda: exercise(folder))

    try:
        law()
    finally:
        (folder / name).write_bytes(original)
    assert done[name] >= PLAN[name] and inside[name] > PLAN[name] / 4
    exercise(folder)


TENSORS = (("it.kvcq", "kvcq.json", "kvcq.safetensors"), ("stats", "stats.json", "samples.safetensors"))


def test_mutated_tensor_headers_are_refused_or_harmless(chain: World) -> None:
    """The hash of the mutated file is listed and sealed, so that the safetensors header itself must hold."""
    kept = {}
    for folder, _, file in TENSORS:
        data = (chain.folder / folder / file).read_bytes()
        size = int.from_bytes(data[:8], "little")
        kept[folder] = (data, json.loads(data[8 : 8 + size]), data[8 + size :])

    @mutations("tensors")
    @given(st.data())
    def law(data: st.DataObject) -> None:
        folder, header, file = data.draw(st.sampled_from(TENSORS))
        original, table, body = kept[folder]
        if data.draw(st.booleans()):
            text = as_bytes(render(data.draw(edits(table))))
            length = data.draw(st.sampled_from((len(text), len(text), len(text), 0, 2**63, len(text) + 8, 7)))
            changed = length.to_bytes(8, "little") + text + body
        else:
            changed = data.draw(raw_bytes(original[: len(original) - len(body)])) + body
        path = chain.folder / folder
        before = (path / header).read_bytes()
        try:
            (path / file).write_bytes(changed)
            document = json.loads(before)
            for entry in document["files"]:
                if entry["name"] == file:
                    entry.update(size=len(changed), sha256=hashlib.sha256(changed).hexdigest())
            (path / header).write_bytes(sealed(document))
            ends_well("tensors", lambda: exercise(path))
        finally:
            (path / file).write_bytes(original)
            (path / header).write_bytes(before)

    law()
    assert done["tensors"] >= PLAN["tensors"] and inside["tensors"] > PLAN["tensors"] / 5


RECIPE = """\
method: oscar
params: {clip_k: 0.9, groups: 4, metadata: fp16-bias, value_target: logit_energy}
windows: {sink: 2, recent: 6}
skip_layers: [3, 5]
target_context: 4096
seed: 7
"""
GATES = """\
gates:
  - {metric: kl, context: max, max: 0.1}
  - {metric: bits, context: 8192, max: 3.5, artifacts: [nova]}
"""
YAML_TEXT = (
    "!!python/object/apply:os.system ['touch owned']", "!!python/name:os.system", "!!binary aGk=", "!!set {a, b}",
    "!custom x", "&a [*a]", "*missing", "<<: {a: 1}", "? [a, b]\n: c", "2020-13-45", "0x" + "f" * 5000, "1:2:3:4",
    ".inf", ".nan", "~", "yes", "'", '"\\x', "[" * 900, "{" * 900, "- " * 900, "|\n  text", "%YAML 9.9\n---",
    "---\n---\n", "\t", "\x00", "\x85", "\ufeff", "{=: 1}", "1_000_000", "a: b: c", "x" * 20_000,
    "[" + "1," * 2000 + "]",
)  # fmt: skip


def test_mutated_recipes_and_gates_are_refused_or_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mutated.yaml"

    def as_recipe() -> None:
        fields = apply_settings(load_recipe(path), ("clip_v=0.8", "windows.recent=9"))
        resolve(fields, path)

    cases = ((RECIPE, as_recipe), (RECIPE, as_recipe), (GATES, lambda: load_gates(path)))

    @mutations("recipe")
    @given(st.data())
    def law(data: st.DataObject) -> None:
        text, use = data.draw(st.sampled_from(cases))
        how = data.draw(st.sampled_from(("insert", "insert", "value", "lines", "bytes")))
        words = text.split(" ")
        if how == "bytes":
            changed = data.draw(raw_bytes(text.encode()))
        elif how == "insert":
            at = data.draw(st.integers(0, len(text)))
            changed = as_bytes(text[:at] + data.draw(st.sampled_from(YAML_TEXT) | st.text(max_size=9)) + text[at:])
        elif how == "value":
            at = data.draw(st.integers(0, len(words) - 1))
            changed = as_bytes(" ".join([*words[:at], data.draw(st.sampled_from(YAML_TEXT)), *words[at + 1 :]]))
        else:
            changed = as_bytes("\n".join(data.draw(st.permutations(text.splitlines() * 2))))
        path.write_bytes(changed)
        ends_well("recipe", use)

    law()
    assert done["recipe"] >= PLAN["recipe"] and inside["recipe"] > PLAN["recipe"] / 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["mutated.yaml"]


def test_the_plan_has_two_thousand_mutations() -> None:
    assert sum(PLAN.values()) == 2000
