"""Kernels run in Triton's interpreter where there is no GPU; tests marked `gpu` need one."""

from __future__ import annotations

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not HAS_CUDA:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """With its index, as tensors have it."""
    return torch.device("cuda", 0) if HAS_CUDA else torch.device("cpu")


@pytest.fixture(scope="session")
def dtype() -> torch.dtype:
    # The interpreter's bfloat16 products are wrong.
    return torch.bfloat16 if HAS_CUDA else torch.float16
