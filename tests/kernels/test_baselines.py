"""The BF16 kernels of a run: which there are, how FlashInfer is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcq.pipeline.bench import baselines
from kvcq.pipeline.bench.shapes import Shape
from kvcq.pipeline.bench.timing import Timing

CHUNK, WHOLE, TOKEN = Shape(2, 100, 64, 4, 2, chunk=30), Shape(2, 100, 64, 4, 2, chunk=100), Shape(2, 100, 64, 4, 2)


@pytest.mark.parametrize("installed", [False, True])
def test_flashinfer_is_compared_with_where_it_is_installed(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "find_spec", lambda name: object() if installed else None)
    more = ["FlashInfer, ragged", "FlashInfer, paged"] if installed else []
    assert list(baselines._prefill(CHUNK)) == ["flash", *more]
    assert list(baselines._prefill(WHOLE)) == ["flash", "SDPA cuDNN", *more]
    assert ("FlashInfer" in baselines._decode(TOKEN)) == installed


class Wrapper:
    """Takes what FlashInfer 0.5.3 takes, by the same names."""

    def __init__(self, workspace: Tensor, layout: str, use_tensor_cores: bool = False) -> None:
        self.layout = layout

    def run(self, q: Tensor, *kv: Tensor, out: Tensor) -> Tensor:
        assert out.shape == q.shape and all(one.shape[-1] == q.shape[-1] for one in kv)
        assert kv[0].shape[2] == 2 if self.layout == "HND" else kv[0].shape[1] == 2
        return out


class Ragged(Wrapper):
    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, *,
        causal: bool, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert causal and (num_qo_heads, num_kv_heads, head_dim_qk) == (4, 2, 64)
        assert qo_indptr.tolist() == [0, 30, 60] and kv_indptr.tolist() == [0, 100, 200]


class Paged(Wrapper):
    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *,
        causal: bool, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert causal and (num_qo_heads, num_kv_heads, head_dim_qk, page_size) == (4, 2, 64, 64)
        assert qo_indptr.tolist() == [0, 30, 60] and paged_kv_indptr.tolist() == [0, 2, 4]
        assert sorted(paged_kv_indices.tolist()) == [0, 1, 2, 3] and paged_kv_last_page_len.tolist() == [36, 36]


class Decode(Wrapper):
    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, *,
        q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert indptr.tolist() == [0, 2, 4] and last_page_len.tolist() == [36, 36]
        assert (num_qo_heads, num_kv_heads, head_dim, page_size) == (4, 2, 64, 64)


def test_flashinfer_gets_what_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(
        BatchPrefillWithRaggedKVCacheWrapper=Ragged,
        BatchPrefillWithPagedKVCacheWrapper=Paged,
        BatchDecodeWithPagedKVCacheWrapper=Decode,
    )
    for name, instead in {"import_module": lambda _: library, "DEVICE": "cpu", "_layers": lambda _: 2}.items():
        monkeypatch.setattr(baselines, name, instead)
    for prepare, shape in (
        (baselines._flashinfer_ragged, CHUNK),
        (baselines._flashinfer_paged, CHUNK),
        (baselines._flashinfer, TOKEN),
    ):
        assert len([call() for call in prepare(shape)]) == 2


def test_a_library_that_fails_says_why_and_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise RuntimeError("no nvcc\nand more")

    monkeypatch.setattr(baselines, "_prefill", lambda shape: {"one": broken, "two": lambda: iter([])})
    monkeypatch.setattr(baselines, "time_calls", lambda calls, repeats: Timing(5.0, 5.0, 5.0, 1))
    monkeypatch.setattr(baselines, "free", lambda: None)
    found = baselines.baselines(CHUNK, 1)
    assert found[0].timing is None and found[0].problem == "RuntimeError: no nvcc"
    assert baselines.best(found) is found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [CHUNK, WHOLE, TOKEN], ids=["chunk", "whole", "token"])
def test_those_of_torch_run(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "find_spec", lambda name: None)
    assert not [one for one in baselines.baselines(shape, 1) if one.timing is None]
