"""Shards merge to the bytes of a single run: any number of them, in any order."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcq.artifacts.stats_file import read_stats, write_stats
from kvcq.artifacts.verify import verify
from kvcq.cli.main import execute
from kvcq.errors import InputError, KvcqError, MismatchError
from kvcq.pipeline.collect import collect
from kvcq.pipeline.fit import fit
from kvcq.pipeline.inspect import inspect
from kvcq.pipeline.merge import merge
from kvcq.pipeline.requests import CollectRequest, FitRequest, MergeRequest
from tests.chain import WORDS, World, contents
from tests.tiny import save_tiny

TEXTS = 40
COUNTS = (1, 2, 5)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty texts of different lengths."""
    draw = random.Random(3)
    path = tmp_path_factory.mktemp("corpus") / "forty.jsonl"
    rows = (" ".join(draw.choice(WORDS) for _ in range(draw.randint(5, 40))) for _ in range(TEXTS))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    return path


def run(world: World, corpus: Path, out: Path, **options: Any) -> Path:
    defaults: dict[str, Any] = {"num_tokens": 100_000, "seq_len": 128, "chunk": 64, "rows": 256, "query_rows": 64}
    defaults |= {"model": str(world.model), "data": (str(corpus),), "out": out}
    if not out.exists():
        collect(CollectRequest(**defaults | options))
    return out


def shards(world: World, corpus: Path, folder: Path, count: int, **options: Any) -> list[Path]:
    return [run(world, corpus, folder / f"{i}of{count}", shard=(i, count), **options) for i in range(count)]


@pytest.fixture(scope="module")
def made(world: World, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Path]]:
    """Shards by their number; 0 is the single run."""
    folder = tmp_path_factory.mktemp("made")
    single = [run(world, corpus, folder / "single")]
    return {0: single} | {count: shards(world, corpus, folder, count) for count in COUNTS}


@settings(max_examples=20)
@given(data=st.data())
def test_any_sharding_in_any_order_gives_the_bytes_of_one_run(
    made: dict[int, list[Path]], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    count = data.draw(st.sampled_from(COUNTS))
    order = data.draw(st.permutations(made[count]))
    out = tmp_path_factory.mktemp("merged") / "stats"
    result = merge(MergeRequest(stats=tuple(order), out=out))
    assert contents(out) == contents(made[0][0]) and result.shards == count
    shutil.rmtree(out)


def test_shardings_may_be_mixed(world: World, corpus: Path, made: dict[int, list[Path]], tmp_path: Path) -> None:
    quarters = [run(world, corpus, tmp_path / f"q{i}", shard=(i, 4)) for i in (1, 3)]
    assert "merge all shards at once" in refusal(2, made[2][0], quarters[0], out=tmp_path / "stats")
    merge(MergeRequest(stats=(quarters[1], made[2][0], quarters[0]), out=tmp_path / "stats"))
    assert contents(tmp_path / "stats") == contents(made[0][0])


@pytest.mark.parametrize(
    "options",
    [
        {"packing": "isolate", "dtype": "bfloat16"},
        {"packing": "off"},
        {"num_tokens": 600},
        {"num_tokens": 600, "rows": 16384},
    ],
    ids=["isolate", "off", "split probe", "more rows than tokens"],
)
def test_every_packing_and_probe_merges(world: World, corpus: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    single = run(world, corpus, tmp_path / "single", **options)
    parts = shards(world, corpus, tmp_path, 3, **options)
    for number, order in enumerate(itertools.permutations(parts)):
        out = tmp_path / f"merged{number}"
        merge(MergeRequest(stats=order, out=out))
        assert contents(out) == contents(single)


def test_one_sequence_a_shard_merges_though_a_shard_may_hold_only_the_probe(
    world: World, corpus: Path, made: dict[int, list[Path]], tmp_path: Path
) -> None:
    header = read_stats(made[0][0]).header
    count = len(header.sequences) + len(header.probe)
    parts = shards(world, corpus, tmp_path, count)
    assert sum(read_stats(part).header.tokens == 0 for part in parts) == len(header.probe) == 2
    assert all(verify(part).kind == "stats" for part in parts)
    merge(MergeRequest(stats=tuple(parts), out=tmp_path / "stats"))
    assert contents(tmp_path / "stats") == contents(made[0][0])
    with pytest.raises(InputError, match=f"is empty.*at most {count} shards"):
        run(world, corpus, tmp_path / "none", shard=(count, count + 1))


def test_a_shard_resumes_and_merges(world: World, corpus: Path, made: dict[int, list[Path]], tmp_path: Path) -> None:
    from tests.crash.test_resume import interrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, 2, KeyboardInterrupt())
        run(world, corpus, tmp_path / "again", shard=(1, 2))
    run(world, corpus, tmp_path / "again", shard=(1, 2), resume=True)
    assert contents(tmp_path / "again") == contents(made[2][1])


def test_fit_refuses_a_shard_and_inspect_names_it(made: dict[int, list[Path]], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"shard 1/2.*kvcq merge"):
        fit(FitRequest(stats=made[2][1], out=tmp_path / "fit", method="oscar"))
    assert "1/2 of" in inspect(made[2][1]).text() and "shard" not in inspect(made[0][0]).text()


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0), (7, 5)])
def test_shards_that_do_not_exist_are_refused_with_the_legal_ones(
    world: World, corpus: Path, tmp_path: Path, shard: tuple[int, int]
) -> None:
    with pytest.raises(InputError, match=r"--shard.*from 0 to N-1: 0/"):
        run(world, corpus, tmp_path / "stats", shard=shard)


def refusal(code: int, *paths: Path, out: Path) -> str:
    with pytest.raises(KvcqError) as caught:
        merge(MergeRequest(stats=paths, out=out))
    assert caught.value.exit_code == code and not out.exists() and "\n" not in str(caught.value)
    return str(caught.value)


def test_incomplete_and_overlapping_sets_are_refused(
    world: World, corpus: Path, made: dict[int, list[Path]], tmp_path: Path
) -> None:
    out, five = tmp_path / "stats", made[5]
    assert "shards 1/5, 3/5 are missing" in refusal(2, five[4], five[0], five[2], out=out)
    assert "shards 0/2 and 0/2 share" in refusal(2, made[2][0], made[2][0], made[2][1], out=out)
    assert "share sequence" in refusal(2, *five, made[2][0], out=out)
    assert "not a shard but a whole collection" in refusal(2, *made[2], made[0][0], out=out)
    assert "nothing to merge" in refusal(2, out=out)
    assert "stats.json is missing" in refusal(4, world.fits["oscar"], out=out)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": 1}, "seed"),
        ({"rows": 300}, "rows"),
        ({"chunk": 32}, "chunk"),
        ({"query_rows": 32}, "query_rows"),
        ({"packing": "off"}, "data.packing"),
        ({"num_tokens": 900}, "data.wanted_tokens"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_shards_of_other_options_are_refused_by_field(
    world: World, corpus: Path, made: dict[int, list[Path]], tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    other = run(world, corpus, tmp_path / "other", shard=(1, 2), **options)
    for order in ((made[2][0], other), (other, made[2][0])):
        line = refusal(2, *order, out=tmp_path / "stats")
        assert named in line and str(other) in line and str(made[2][0]) in line


def test_shards_of_another_model_do_not_fit_with_5(
    world: World, corpus: Path, made: dict[int, list[Path]], tmp_path: Path
) -> None:
    model = save_tiny(tmp_path / "model", "llama", num_hidden_layers=2)
    other = run(world, corpus, tmp_path / "other", shard=(1, 2), model=str(model))
    line = refusal(5, made[2][0], other, out=tmp_path / "stats")
    assert "geometry" in line
    assert issubclass(MismatchError, KvcqError)


def test_warnings_are_kept_once_in_an_order_of_their_own(made: dict[int, list[Path]], tmp_path: Path) -> None:
    parts = []
    for number, path in enumerate(made[2]):
        stats = read_stats(path)
        header = stats.header.model_copy(update={"warnings": ("both", f"only {number}"), "files": (), "digest": ""})
        write_stats(tmp_path / str(number), header, stats.moments, stats.samples)
        parts.append(tmp_path / str(number))
    for number, order in enumerate((parts, parts[::-1])):
        result = merge(MergeRequest(stats=tuple(order), out=tmp_path / f"out{number}"))
        assert result.header.warnings == ("both", "only 0", "only 1")
    assert contents(tmp_path / "out0") == contents(tmp_path / "out1")


def test_memory_of_a_merge_does_not_grow_with_the_number_of_shards(
    world: World, corpus: Path, made: dict[int, list[Path]], tmp_path: Path
) -> None:
    """One wide layer: the sums of a shard are 13 MB, and ten shards would be 130."""
    model = save_tiny(tmp_path / "model", "llama", head_dim=128, num_key_value_heads=4, num_hidden_layers=2)
    parts = shards(world, corpus, tmp_path, 10, model=str(model))
    size = (parts[0] / "moments.safetensors").stat().st_size
    merge(MergeRequest(stats=tuple(parts), out=tmp_path / "first"))
    process, peak, before = psutil.Process(), [0], psutil.Process().memory_info().rss

    class Watch:
        def stage(self, text: str) -> None: ...
        def note(self, text: str) -> None: ...
        def warn(self, text: str) -> None: ...

        def advance(self, done: int, total: int, unit: str) -> None:
            peak[0] = max(peak[0], process.memory_info().rss)

    merge(MergeRequest(stats=tuple(parts), out=tmp_path / "second"), Watch())
    assert size > 10_000_000 and peak[0] - before < 6 * size


def test_a_dry_run_compares_and_writes_nothing(made: dict[int, list[Path]], tmp_path: Path) -> None:
    result = merge(MergeRequest(stats=tuple(made[2]), out=tmp_path / "stats", dry_run=True))
    assert result.path is None and "dry run" in result.text() and result.header.shard is None
    assert not list(tmp_path.iterdir())


def test_the_command_line_merges_and_answers_in_json(
    made: dict[int, list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["merge", *map(str, made[2]), "--out", str(tmp_path / "stats"), "--json", "-q"]
    assert execute(words) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["shards"] == 2 and record["digest"] == read_stats(tmp_path / "stats").digest
    assert execute(["collect", "m", "--data", "x", "--shard", "one/2"]) == 2
    assert "I/N with I from 0 to N-1" in capsys.readouterr().err
