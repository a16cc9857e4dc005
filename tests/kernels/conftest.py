"""Kernels run in Triton's interpreter where there is no GPU; tests marked `gpu` need one."""

from __future__ import annotations

import os

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()

if not HAS_CUDA:
    # Read when a kernel is decorated, so before any module with kernels is imported.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not HAS_CUDA:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if HAS_CUDA else "cpu")


@pytest.fixture(scope="session")
def dtype() -> torch.dtype:
    # The interpreter's bfloat16 products are wrong.
    return torch.bfloat16 if HAS_CUDA else torch.float16
