from __future__ import annotations

import pytest

from tests.chain import World, llama_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return llama_world(tmp_path_factory.getbasetemp())
