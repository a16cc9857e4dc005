"""Model-level tasks of validate on a tiny model: the served path against an independent one-pass computation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvcq.artifacts.report_file import read_report
from kvcq.data.documents import iter_documents
from kvcq.data.sequences import build_corpus
from kvcq.errors import EvaluationError, InputError, UnsupportedError
from kvcq.evaluation.simulate import exact_by_query, exact_served
from kvcq.models.attention import attention_hook
from kvcq.models.library import forward
from kvcq.models.load import load_model
from kvcq.pipeline import runners as runners_module
from kvcq.pipeline.measure import simulated_hook
from kvcq.pipeline.subjects import open_subjects
from kvcq.spec.boundary import served_boundaries
from kvcq.spec.report import ArtifactReport, Report
from kvcq.spec.tasks import TaskScores
from tests.chain import World

ALL = ("perplexity", "needle", "agreement", "decode-kl")
SMALL = {
    "tasks": ALL,
    "contexts": (160,),
    "chunk": 32,
    "passages": 2,
    "new_tokens": 6,
    "decode_steps": 4,
    "needle_tasks": ("single_1", "single_2"),
    "needle_lengths": (470,),
    "needle_depths": (0.0, 100.0),
    "needle_items": 2,
    "canary": (),
}


def scores(row: ArtifactReport) -> TaskScores:
    assert row.tasks is not None
    return row.tasks


@pytest.fixture(scope="module")
def report(world: World, tmp_path_factory: pytest.TempPathFactory) -> Report:
    fits = [world.fits[name] for name in ("nova", "bf16", "kivi")]
    return world.validate(tmp_path_factory.mktemp("tasks") / "report", *fits, **SMALL).report


def test_an_artifact_without_codes_is_the_reference_exactly(report: Report) -> None:
    reference, _, exact, _ = map(scores, report.artifacts)
    assert exact == reference
    assert exact.perplexity[0].ratio == 1.0 and exact.decode_kl[0].kl == 0.0
    assert exact.agreement[0].agreement == 1.0 and exact.agreement[0].first_divergence == (None, None)


def test_codes_cost_something_and_every_row_says_which_cache_it_is(report: Report) -> None:
    reference, nova, exact, kivi = map(scores, report.artifacts)
    assert [own.cache for own in (reference, nova, exact, kivi)] == ["simulate", "packed", "simulate", "simulate"]
    for own in (nova, kivi):
        assert own.decode_kl[0].kl > 1e-4 and own.perplexity[0].nll != reference.perplexity[0].nll
        assert own.perplexity[0].ratio_interval.low <= own.perplexity[0].ratio <= own.perplexity[0].ratio_interval.high


def test_settings_state_what_the_numbers_depend_on(report: Report) -> None:
    assert report.semantics == "by-query" and report.chunk is None
    settings = report.tasks
    assert settings is not None and settings.perplexity is not None and settings.needle is not None
    assert (settings.perplexity.chunk, settings.perplexity.stride, settings.perplexity.score_from) == (32, 160, 0.5)
    assert settings.needle.haystack == "builtin:noise" and len(settings.needle.haystack_sha256) == 64
    assert settings.needle.new_tokens == {"single_1": 32, "single_2": 32}
    needle = scores(report.artifacts[1]).needle
    assert needle is not None and len(needle.items) == 4 and needle.errors == 0
    assert {cell.depth for cell in needle.cells} == {0.0, 100.0}
    assert all(entry.prompt_tokens + 32 <= 470 for entry in needle.items)


def test_every_two_rows_are_compared_on_the_same_items(report: Report) -> None:
    names = [row.name for row in report.artifacts]
    assert [(pair.first, pair.second) for pair in report.pairs] == [
        (a, b) for i, a in enumerate(names) for b in names[i + 1 :]
    ]
    assert all(pair.items == 4 for pair in report.pairs)


def test_tasks_alone_measure_no_attention(report: Report) -> None:
    assert all(row.contexts == () and row.layers == () for row in report.artifacts)


def one_pass(world: World, name: str, exact: Callable[..., torch.Tensor]) -> float:
    """Loss of the second half of 160 tokens under a mask, by one forward over all of them."""
    loaded = load_model(str(world.model), notify=lambda _: None)
    documents = iter_documents([str(world.held_out)])
    corpus = build_corpus(documents, loaded.tokenizer, labels=("x",), seq_len=160, num_tokens=160)
    tokens = torch.from_numpy(corpus.sequences[0].tokens.astype("int64"))
    (subject,) = open_subjects([world.fits[name]])
    with attention_hook(loaded.model, simulated_hook(subject.codecs("cpu"), exact(subject.windows)[:159, :159])):
        logits = forward(loaded.model, tokens[None, :159])[0]
    losses = torch.nn.functional.cross_entropy(logits.double(), tokens[1:], reduction="none")
    return float(losses[79:].sum())


@pytest.mark.parametrize("cached", [None, 50])
def test_served_perplexity_is_that_of_the_boundaries(world: World, tmp_path: Path, cached: int | None) -> None:
    options = {"tasks": ("attention", "perplexity"), "contexts": (160,), "chunk": 48, "cached_at": cached}
    result = world.validate(tmp_path / "r", world.fits["oscar"], semantics="served", canary=(), **options).report
    assert (result.semantics, result.chunk, result.cached_at) == ("served", 48, cached)
    boundaries = served_boundaries(159, 48, cached)
    wanted = one_pass(world, "oscar", lambda windows: exact_served(159, boundaries, windows))
    assert scores(result.artifacts[1]).perplexity[0].nll == pytest.approx(wanted, rel=2e-4)


@pytest.mark.parametrize("chunk", [7, 159])
@pytest.mark.parametrize("cache", ["packed", "simulate"])
def test_by_query_perplexity_is_that_of_the_window_rule_whatever_chunk_and_cache(
    world: World, tmp_path: Path, chunk: int, cache: str
) -> None:
    options = {"tasks": ("perplexity",), "contexts": (160,), "chunk": chunk, "cache": cache, "canary": ()}
    result = world.validate(tmp_path / "r", world.fits["oscar"], **options).report
    wanted = one_pass(world, "oscar", lambda windows: exact_by_query(160, windows))
    row = scores(result.artifacts[1])
    assert row.cache == cache and row.perplexity[0].nll == pytest.approx(wanted, rel=2e-4)


def test_deferred_quantization_decodes_from_an_exact_prefill(world: World, tmp_path: Path) -> None:
    options = {"tasks": ("agreement", "decode-kl"), "contexts": (160,), "chunk": 32, "new_tokens": 4, "canary": ()}
    found = {}
    for semantics in ("by-query", "deferred"):
        result = world.validate(tmp_path / semantics, world.fits["oscar"], semantics=semantics, **options).report
        found[semantics] = scores(result.artifacts[1])
    # The prompt's own prediction is exact up to the cast of the rows; the steps after it are not.
    assert found["deferred"].agreement[0].kl < found["by-query"].agreement[0].kl
    assert found["deferred"].decode_kl[0].kl > 1e-4


def test_a_text_of_the_user_is_named_without_its_folder(world: World, tmp_path: Path) -> None:
    hay = tmp_path / "essay.txt"
    hay.write_text("A stone lies by the river. The answer is under the sand. " * 3)
    options = SMALL | {"tasks": ("needle",), "haystack": str(hay), "needle_tasks": ("single_2",), "needle_items": 1}
    result = world.validate(tmp_path / "r", world.fits["oscar"], **options).report
    assert result.tasks is not None and result.tasks.needle is not None
    assert result.tasks.needle.haystack == "essay.txt" and "--haystack essay.txt" in result.command
    assert str(tmp_path) not in read_report(tmp_path / "r").data["report.json"].tobytes().decode()


def test_a_failing_item_stops_the_run_and_nothing_is_written(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend = runners_module.CacheSession.extend

    def failing(self: runners_module.CacheSession, tokens: torch.Tensor, keep: int = 1) -> torch.Tensor:
        if self.length > 400:
            raise RuntimeError("device lost")
        return extend(self, tokens, keep)

    monkeypatch.setattr(runners_module.CacheSession, "extend", failing)
    out = tmp_path / "report"
    with pytest.raises(EvaluationError, match=r"device lost \(needle single_1, context 470, row 0, bf16 reference\)"):
        world.validate(out, world.fits["oscar"], **SMALL)
    assert not out.exists() and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options, says",
    [
        ({"tasks": ("perplxity",)}, r"'perplxity' is not known \(--tasks\): did you mean perplexity"),
        ({"tasks": ()}, "nothing to measure"),
        ({"needle_tasks": ("single_9",), "tasks": ("needle",)}, r"--needle-tasks\): did you mean single_"),
        ({"semantics": "server"}, r"--semantics\): did you mean served"),
        ({"cache": "pack"}, r"--cache\): did you mean packed"),
        ({"chunk": 0}, "--chunk"),
        ({"needle_depths": (50.0, 101.0)}, "101 is no percentage"),
        ({"tasks": ("perplexity",), "semantics": "deferred"}, "deferred quantization leaves exact"),
        ({"semantics": "deferred", "cache": "packed"}, r"pages do not keep \(--cache\)"),
        ({"cached_at": 50}, "only a served prefill"),
        ({"semantics": "served", "cached_at": 95}, "leaves nothing of a context of 96"),
        (SMALL | {"tasks": ("needle",), "semantics": "served", "cached_at": 465}, "nothing of a prompt of 4"),
        ({"semantics": "served", "chunk": 96}, r"nothing was quantized .* \(--chunk\)"),
        ({"tasks": ("agreement",), "new_tokens": 400}, "context is 512 tokens, agreement takes 560"),
        ({"tasks": ("needle",), "needle_lengths": (513,)}, "context is 512 tokens, needle takes 513"),
        ({"tasks": ("needle",), "needle_lengths": (70,)}, r"nothing was quantized .* \(--needle-lengths\)"),
        ({"tasks": ("needle",), "needle_lengths": (200,)}, "200 tokens are too few for single_1"),
        ({"tasks": ("needle",), "needle_lengths": (500,), "haystack": "hf:x"}, "is no haystack"),
        ({"tasks": ("needle",), "needle_lengths": (500,), "haystack": "missing.txt"}, "no such file"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(world: World, tmp_path: Path, options: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        world.validate(tmp_path / "report", world.fits["nova"], **options)
    assert not (tmp_path / "report").exists()


def test_codecs_for_accuracy_only_have_no_packed_cache(world: World, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="use mode simulate"):
        world.validate(tmp_path / "report", world.fits["kivi"], tasks=("perplexity",), cache="packed", canary=())


def test_needles_may_be_asked_of_some_artifacts_only(world: World, tmp_path: Path) -> None:
    fits = [world.fits[name] for name in ("nova", "kivi")]
    options = SMALL | {"tasks": ("needle",), "needle_tasks": ("single_1",), "needle_items": 1}
    report = world.validate(tmp_path / "r", *fits, **options, needle_artifacts=("kivi",)).report
    assert [scores(row).needle is not None for row in report.artifacts] == [True, False, True]
    assert [(pair.first, pair.second) for pair in report.pairs] == [(report.artifacts[0].name, "kivi")]
    assert "--needle-artifacts kivi" in report.command
    with pytest.raises(InputError, match=r"--needle-artifacts.*did you mean kivi"):
        world.validate(tmp_path / "s", *fits, **options, needle_artifacts=("kiwi",))
    gates = tmp_path / "gates.yaml"
    gates.write_text("gates: [{metric: needle, min: 0.5}]")
    with pytest.raises(InputError, match="judges nova"):
        world.validate(tmp_path / "s", *fits, **options, needle_artifacts=("kivi",), gates=gates)
