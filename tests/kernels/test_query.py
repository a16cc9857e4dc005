"""Mapped queries against float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcq.errors import UnsupportedError
from kvcq.kernels import query as mapping
from kvcq.kernels.arrays import Tables
from kvcq.kernels.query import launch_shape, map_queries
from kvcq.kernels.reference import reference_query
from tests.kernels.build import random_codec, relative_error

LIMIT = {torch.float16: 5e-4, torch.float32: 1e-6, torch.bfloat16: 3e-3}


def layer(kind: str, d_k: int, dtype: torch.dtype, device: torch.device) -> Tables:
    return Tables.of(random_codec(kind, 2, d_k, 16, dtype, device), 2, d_k, 16, dtype, device)


def queries(tokens: int, q_heads: int, d_k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    draw = torch.Generator().manual_seed(d_k + tokens)
    return torch.randn(tokens, q_heads, d_k, generator=draw).to(dtype).to(device)


def run(tables: Tables, q: Tensor, *, offset: bool = True) -> tuple[Tensor, Tensor | None]:
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
    shift = torch.full(q.shape[:2], torch.nan, device=q.device) if offset else None
    map_queries(tables, q, out, shift)
    return out, shift


@pytest.mark.parametrize("kind", ["naive", "int2", "centred", "vq"])
@pytest.mark.parametrize(
    ("d_k", "group", "tokens"), [(16, 1, 1), (64, 5, 7), (80, 3, 2), (96, 4, 40), (128, 16, 3), (256, 2, 2)]
)
def test_queries_are_those_of_the_codec(
    kind: str, d_k: int, group: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    tables = layer(kind, d_k, dtype, device)
    q = queries(tokens, 2 * group, d_k, dtype, device)
    wanted, offset = reference_query(tables, q)
    found, shift = run(tables, q)
    assert relative_error(found, wanted) < LIMIT[dtype]
    assert shift is not None
    if offset is None:
        assert bool((shift == 0).all())
    else:
        assert relative_error(shift, offset) < 1e-5
    assert torch.equal(run(tables, q, offset=False)[0], found)


@pytest.mark.parametrize("tokens", [3000, 30_000, 300_000])
def test_larger_tiles_give_the_same(
    tokens: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = layer("vq", 96, dtype, device)
    q = queries(37, 6, 96, dtype, device)
    wanted, offset = reference_query(tables, q)
    shape = launch_shape(tokens, 1, 96)
    monkeypatch.setattr(mapping, "launch_shape", lambda *_: shape)
    found, shift = run(tables, q)
    assert shape.rows == {3000: 32, 30_000: 64, 300_000: 128}[tokens]
    assert relative_error(found, wanted) < LIMIT[dtype]
    assert shift is not None and offset is not None and relative_error(shift, offset) < 1e-5


@pytest.mark.parametrize("changes", [{"groups": 2}, {"metadata": "fp32-zero"}, {"pre_rope": True}, {"bits": 3}])
def test_codecs_without_a_kernel_have_no_tables(changes: dict[str, Any]) -> None:
    codec = random_codec("int4", 2, 64, 64, torch.float32)
    assert Tables.of(codec, 2, 64, 64, torch.float32, torch.device("cpu")).k.bits == 4
    changed = replace(codec, k=replace(codec.k, spec=codec.k.spec.model_copy(update=changes)))
    with pytest.raises(UnsupportedError, match="no kernel"):
        Tables.of(changed, 2, 64, 64, torch.float32, torch.device("cpu"))


def test_queries_may_be_a_part_of_a_joint_projection(dtype: torch.dtype, device: torch.device) -> None:
    tables = layer("centred", 64, dtype, device)
    joint = queries(5, 8, 64, dtype, device)
    q = joint[:, 2:6]
    assert not q.is_contiguous()
    assert torch.equal(run(tables, q)[0], run(tables, q.contiguous())[0])


def test_float32_queries_are_exact(device: torch.device) -> None:
    tables = layer("vq", 96, torch.float32, device)
    q = queries(3, 4, 96, torch.float32, device)
    assert relative_error(run(tables, q)[0], reference_query(tables, q)[0]) < LIMIT[torch.float32]


def test_no_token_is_no_launch(dtype: torch.dtype, device: torch.device) -> None:
    out, shift = run(layer("centred", 64, dtype, device), queries(0, 4, 64, dtype, device))
    assert out.shape == (0, 4, 64) and shift is not None and shift.shape == (0, 4)


def test_what_does_not_fit_is_refused(dtype: torch.dtype, device: torch.device) -> None:
    tables = layer("centred", 64, dtype, device)
    q = queries(3, 4, 64, dtype, device)
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"q": q[0]}, "shape"),
        ({"q": q[..., :32]}, r"\[3, 4, 32\]"),
        ({"q": q.double()}, "float64"),
        ({"q": q.transpose(1, 2).contiguous().transpose(1, 2)}, "last dimension"),
        ({"out": q[:2].clone()}, r"out has shape \[2, 4, 64\]"),
        ({"out": q.transpose(0, 1).contiguous().transpose(0, 1)}, "not contiguous"),
        ({"offset": torch.zeros(3, 5, device=device)}, r"offset has shape \[3, 5\]"),
    )
    for changes, said in wrong:
        good: dict[str, Any] = {"q": q, "out": torch.empty_like(q), "offset": None}
        with pytest.raises(ValueError, match=said):
            map_queries(tables, **{**good, **changes})
    for heads in (q[:, :3], q.repeat(1, 16, 1)):
        with pytest.raises(UnsupportedError, match=rf"{heads.shape[1]} query heads .*groups have 1 to 16"):
            map_queries(tables, heads, torch.empty_like(heads), None)
