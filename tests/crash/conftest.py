from __future__ import annotations

import pytest
import torch

from tests.chain import World, llama_world
from tests.crash.verbs import Bench, preload, sealed


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return llama_world(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def references(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What each verb writes when nothing happens; the shards that merge reads are made on the way."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("references")
    (folder / "out").mkdir()
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        preload(world, patch.setattr)
        bench = Bench(world, folder / "out", folder / "log")
        for index in (0, 1):
            shard = world.folder / f"shard{index}"
            if not shard.exists():
                ended = bench.run([*bench.words("collect", shard), "--shard", f"{index}/2"])
                assert ended.code == 0, ended
        for verb in ("collect", "merge", "fit", "validate", "pack", "archive"):
            ended = bench.run(bench.words(verb, bench.out(verb)))
            assert ended.code == 0, ended
            found[verb] = sealed(bench.out(verb))
            bench.clear()
    return found


@pytest.fixture
def bench(world: World, tmp_path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    torch.set_num_threads(1)
    preload(world, monkeypatch.setattr)
    (tmp_path / "out").mkdir()
    return Bench(world, tmp_path / "out", tmp_path / "log")
