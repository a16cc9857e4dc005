"""Which kernel a layer gets: a pure function of the device and the layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcq.kernels.arrays import Tables
from kvcq.kernels.select import (
    Choice,
    Layer,
    Limits,
    choose,
    choose_layer,
    cuda_parts,
    describe,
    launch_shape,
)
from kvcq.spec.plan import Windows
from tests.chain import python
from tests.kernels.build import random_codec

H200 = Limits((9, 0))
QWEN = Layer(128, 128, 8, 4, False)


def chosen(limits: Limits = H200, layer: Layer = QWEN, without: str | None = None, **settings: object) -> Choice:
    return choose_layer(limits, layer, without, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("vq", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", range(1, 9))
def test_cuda_where_it_has_the_shape(vq: bool, head_dim: int, group: int) -> None:
    choice = chosen(layer=Layer(head_dim, head_dim, 8, group, vq))
    assert choice.backend == "cuda"
    shape = launch_shape(head_dim, group, softcap=False)
    assert shape.warps == 4
    assert shape.warps * shape.blocks <= 16
    measured = "measured faster than Triton" in choice.reason
    assert measured == ((head_dim, group) in {(128, 4), (64, 8)})
    assert "not measured" in chosen(Limits((12, 0)), Layer(head_dim, head_dim, 8, group, vq)).reason


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (replace(QWEN, d_k=192), "head dims 192 and 128"),
        (replace(QWEN, d_k=80, d_v=80), "head dims 80 and 80"),
        (replace(QWEN, group=9), "9 query heads"),
        (replace(QWEN, words=4), "4 scales"),
    ],
)
def test_triton_elsewhere_with_the_reason(layer: Layer, reason: str) -> None:
    choice = chosen(layer=layer)
    assert choice.backend == "triton"
    assert reason in choice.reason


def test_triton_without_cuda_core_and_for_other_dtypes() -> None:
    assert chosen(without="cuda.core is not installed") == chosen(without="cuda.core is not installed", batch=4)
    assert chosen(without="cuda.core is not installed").reason == "cuda.core is not installed"
    assert "float16" in chosen(dtype="float16").reason


def test_no_kernel_on_cpu_hip_and_old_devices() -> None:
    assert chosen(Limits(None)) == Choice("torch", "CPU: torch reference")
    assert chosen(Limits((9, 4), hip="7.0")) == Choice("torch", "kernels are not tested on HIP 7.0")
    old = chosen(Limits((7, 5), shared_bytes=65536))
    assert old.backend == "torch"
    assert "7.5" in old.reason


def test_no_kernel_for_groups_that_none_has() -> None:
    assert chosen(layer=replace(QWEN, group=16)).backend == "triton"
    choice = chosen(layer=replace(QWEN, group=24))
    assert (choice.backend, choice.reason) == ("torch", "24 query heads a KV head: kernels have 1 to 16")


@pytest.mark.parametrize("shared_bytes", [65_536, 101_376, 166_912, 232_448])
def test_small_shared_memory_still_fits(shared_bytes: int) -> None:
    for head_dim in (64, 128):
        for vq in (False, True):
            assert chosen(Limits((8, 9), 128, shared_bytes), Layer(head_dim, head_dim, 8, 8, vq)).backend == "cuda"


def test_too_little_shared_memory_is_refused_with_numbers() -> None:
    choice = chosen(Limits((8, 9), 128, 16_384), replace(QWEN, vq=True))
    assert choice.backend == "triton"
    assert "34816 bytes of shared memory a block: this device has 16384" in choice.reason


@pytest.mark.parametrize("context", [1, 500, 8192, 32768, 1 << 20])
@pytest.mark.parametrize("batch", [1, 2, 4, 8, 13, 32, 128, 1000])
def test_items_fill_whole_rounds_of_blocks(batch: int, context: int) -> None:
    choice = chosen(batch=batch, context=context)
    items = choice.parts + batch * -(-320 // choice.exact_rows)
    assert items % (132 * 4 // 8) == 0
    assert choice.parts >= batch


def test_cuts_as_measured() -> None:
    shapes = ((8, 32768), (16, 32768), (32, 8192), (32, 32768), (64, 8192), (128, 8192))
    rounds = [(chosen(batch=batch, context=context).parts + batch) / 66 for batch, context in shapes]
    assert rounds == [1, 2, 2, 4, 4, 8]
    triton = [chosen(batch=batch, context=context, without="x").parts / 16.5 for batch, context in shapes]
    assert triton == [32, 32, 24, 48, 48, 64]
    words = replace(QWEN, vq=True)
    assert chosen(layer=words, batch=32, context=8192, without="x").parts == 64 * 16.5


def test_few_requests_have_short_exact_items() -> None:
    rows = [chosen(batch=batch).exact_rows for batch in (1, 2, 3, 4, 5, 64)]
    assert rows == [80, 80, 160, 160, 320, 320]
    assert all(-(-320 // found) * found == 256 + 64 for found in rows)


def test_small_devices_and_large_windows_have_parts() -> None:
    assert cuda_parts(1, 1, 1, 0) == 1
    assert cuda_parts(0, 3, 10, 2) >= 1
    assert chosen(Limits((9, 0), 1)).parts >= 1
    assert chosen(batch=4, windows=Windows(sink=64, recent=30_000)).parts >= 4
    assert chosen(layer=replace(QWEN, group=16), batch=1).parts < chosen(layer=replace(QWEN, group=16), batch=64).parts


def test_blocks_are_counted_as_shared_memory_lets_them_run() -> None:
    small = Limits((8, 9), 128, 101_376)
    words = replace(QWEN, vq=True)
    assert (chosen(small, batch=64).parts + 64) % (128 * 4 // 8) == 0
    assert (chosen(small, words, batch=16).parts + 16) % (128 * 2 // 8) == 0


def test_wide_heads_of_large_groups_run_fewer_blocks() -> None:
    assert launch_shape(128, 4, True).blocks == launch_shape(64, 8, True).blocks == 4
    assert launch_shape(128, 5, False).blocks == 3
    assert launch_shape(128, 8, True).blocks == 2


def test_from_the_constants_of_a_layer() -> None:
    codec = random_codec("v_groups", 2, 64, 64, torch.float32)
    tables = Tables.of(codec, 2, 64, 64, torch.float32, torch.device("cpu"))
    assert "4 scales" in choose((9, 0), tables, 4, without=None).reason
    assert choose(None, tables, 4).backend == "torch"
    assert choose((9, 0), tables, 4, without="not here").reason == "not here"


def test_rows_of_env() -> None:
    names = ["INT2 decode", "INT2 write", "VQ decode", "VQ write"]
    assert describe(Limits(None), None) == [(name, "CPU: torch reference") for name in names]
    assert all(row.startswith("cuda (") for _, row in describe(H200, None))
    without = "triton (cuda.core is not installed)"
    assert describe(H200, "cuda.core is not installed") == [(name, without) for name in names]


def test_choosing_imports_neither_triton_nor_cuda() -> None:
    program = "import sys, kvcq.kernels.select; print(sorted({'triton', 'torch', 'cuda'} & set(sys.modules)))"
    assert python("-c", program).stdout.strip() == b"[]"
