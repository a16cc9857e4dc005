"""The public entry of decode: work list, partial results and merge together, against float64 attention."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from kvcq.errors import UnsupportedError
from kvcq.kernels import attention, limits, merge, plan
from kvcq.kernels import decode as triton_decode
from kvcq.kernels.attention import Decoder
from kvcq.kernels.cuda import compile as cuda_compile
from kvcq.kernels.cuda import decode as cuda_decode
from kvcq.kernels.limits import device_limits
from kvcq.kernels.reference import reference_decode
from kvcq.spec.plan import Windows
from tests.kernels.build import SMALL, Case, build_case, relative_error

SCALING = 0.11
LENGTHS = (1, 97, 0, 225)
DEFAULT = Windows(sink=64, recent=256)
ODD = (1, 63, 64, 65, 0, 320, 321, 384, 700, 1500)


def reserved(case: Case, max_batch: int | None = None, **settings: Any) -> Decoder:
    batch = case.requests.batch if max_batch is None else max_batch
    return Decoder.reserve(case.tables, case.cache.windows, case.q.shape[1], batch, 4096, case.q.device, **settings)


def error_of(case: Case, decoder: Decoder, *, window: int | None = None, **arguments: Any) -> float:
    case = replace(case, q=case.q.contiguous(), offset=case.offset.contiguous())
    arguments = {"scaling": SCALING, "offset": case.offset, **arguments}
    out = torch.full((*case.q.shape[:2], case.tables.v.d), torch.nan, dtype=case.q.dtype, device=case.q.device)
    decoder.partials.o.fill_(torch.nan)
    decoder.partials.ml.fill_(torch.nan)
    decoder.plan(case.requests, window)
    decoder.decode(case.tables, case.cache, case.requests, case.q, out, **arguments)
    assert out.isfinite().all()
    assert not out[case.requests.lengths == 0].any()
    wanted = reference_decode(case.tables, case.cache, case.requests, case.q, window=window, **arguments)
    return relative_error(out, wanted)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("int2", {}),
        ("vq", {"rotate": False}),
        ("centred", {"softcap": 9.0, "window": 40}),
    ],
)
def test_equals_float64_attention(
    kind: str, arguments: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> None:
    case = build_case(kind, LENGTHS, device=device, dtype=dtype)
    decoder = reserved(case, 6)
    assert error_of(case, decoder, **arguments) < (2e-3 if dtype == torch.bfloat16 else 1e-3)


def test_learned_sinks_take_their_share(device: torch.device, dtype: torch.dtype) -> None:
    case = build_case("centred", (70, 3), device=device, dtype=dtype)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    assert error_of(case, reserved(case), sinks=sinks) < (2e-3 if dtype == torch.bfloat16 else 1e-3)


def test_a_backend_is_taken_on_demand(device: torch.device, dtype: torch.dtype) -> None:
    case = build_case("int2", (70,), device=device, dtype=dtype)
    assert reserved(case, backend="triton").choice.backend == "triton"
    if device.type == "cpu":
        with pytest.raises(UnsupportedError, match="cuda decode"):
            reserved(case, backend="cuda")


def test_what_does_not_fit_is_refused(device: torch.device, dtype: torch.dtype) -> None:
    case = build_case("int2", (70,), device=device, dtype=dtype)
    with pytest.raises(UnsupportedError, match="5 query heads on 2 KV heads"):
        Decoder.reserve(case.tables, SMALL, 5, 1, 100, device)
    with pytest.raises(UnsupportedError, match="no decode kernel: 24 query heads a KV head"):
        Decoder.reserve(case.tables, SMALL, 48, 1, 100, device)
    with pytest.raises(ValueError, match=r"scaling of -1\.0 is not positive"):
        error_of(case, reserved(case), scaling=-1.0)
    with pytest.raises(ValueError, match="longest request of 0"):
        Decoder.reserve(case.tables, SMALL, 4, 1, 0, device)
    decoder = Decoder.reserve(case.tables, Windows(sink=1, recent=8), 4, 1, 100, device)
    with pytest.raises(ValueError, match="reserved for"):
        decoder.decode(case.tables, case.cache, case.requests, case.q, case.q, scaling=1.0)


def test_a_step_that_was_not_planned_is_refused(device: torch.device, dtype: torch.dtype) -> None:
    case = build_case("int2", (70, 9), device=device, dtype=dtype)
    decoder, arrays = reserved(case, 6), (case.tables, case.cache, case.requests, case.q.contiguous(), case.q)
    with pytest.raises(ValueError, match="a step of 2 requests: the work list is of 0"):
        decoder.decode(*arrays, scaling=1.0)
    decoder.plan(build_case("int2", (70, 9, 1), device=device, dtype=dtype).requests)
    with pytest.raises(ValueError, match="a step of 2 requests: the work list is of 3"):
        decoder.decode(*arrays, scaling=1.0)


@pytest.mark.parametrize("kind", ["centred", "vq"])
def test_centred_keys_ask_for_what_logits_lack(kind: str, device: torch.device, dtype: torch.dtype) -> None:
    case = build_case(kind, (70,), device=device, dtype=dtype)
    sinks = torch.zeros(case.q.shape[1], device=device)
    for arguments, said in (({"softcap": 9.0}, "a softcap of 9"), ({"sinks": sinks}, "learned sinks")):
        with pytest.raises(ValueError, match=f"{said} over keys that are centred"):
            error_of(case, reserved(case), offset=None, **arguments)
    # Without them a mean shifts all logits of a query alike.
    assert error_of(case, reserved(case), offset=None) < (2e-3 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CUDA launcher's refusals, where there is no CUDA")
def test_the_cuda_launcher_refuses_before_it_launches(dtype: torch.dtype) -> None:
    case = build_case("int2", (70,), dtype=dtype)
    decoder = reserved(case)
    arrays = (case.tables, case.cache, case.requests, case.q.contiguous(), decoder.work, decoder.partials)
    shape = cuda_compile.Shape(4, 4)
    with pytest.raises(UnsupportedError, match="float16"):
        cuda_decode.decode_partials_cuda(*arrays, shape=shape, scaling=1.0)
    with pytest.raises(ValueError, match="not positive"):
        cuda_decode.decode_partials_cuda(*arrays, shape=shape, scaling=1.0, softcap=0.0)
    wide = build_case("int2", (70,), d_k=80, dtype=dtype)
    decoder = reserved(wide)
    arrays = (wide.tables, wide.cache, wide.requests, wide.q.contiguous(), decoder.work, decoder.partials)
    with pytest.raises(UnsupportedError, match="head dims 80 and 80"):
        cuda_decode.decode_partials_cuda(*arrays, shape=shape, scaling=1.0)


def test_limits_of_the_interpreter_and_of_devices(device: torch.device) -> None:
    found = device_limits(device)
    assert found.hip is None
    assert found.capability is not None
    assert (found.shared_bytes == 0) == (device.type == "cpu")


@pytest.mark.parametrize("module", [attention, limits, merge, plan, triton_decode, cuda_decode, cuda_compile])
def test_no_launch_path_waits_for_the_device(module: ModuleType) -> None:
    names = {node.attr for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Attribute)}
    assert not names & {"item", "tolist", "cpu", "numpy", "synchronize", "nonzero"}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("kind", ["int2", "vq", "centred"])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 8), (128, 4), (128, 7), (64, 1)])
def test_eager_and_graph_agree_and_are_right(backend: str, kind: str, head_dim: int, group: int) -> None:
    case = build_case(
        kind, ODD, group=group, d_k=head_dim, dtype=torch.bfloat16, device="cuda", windows=DEFAULT, exact_from=[0] * 10
    )
    case = replace(case, q=case.q.contiguous())
    decoder = reserved(case, backend=backend)
    assert error_of(case, decoder) < 2e-3
    out = torch.full_like(case.q, torch.nan)

    def step() -> None:
        decoder.plan(case.requests)
        decoder.decode(case.tables, case.cache, case.requests, case.q, out, scaling=SCALING)

    step()
    eager = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(eager, out)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["centred", "vq"])
def test_cuda_has_every_logit_feature(kind: str) -> None:
    case = build_case(
        kind, ODD, group=5, d_k=128, dtype=torch.bfloat16, device="cuda", windows=DEFAULT,
        exact_from=[0, 0, 0, 10, 0, 300, 200, 0, 650, 1499],
    )  # fmt: skip
    decoder = reserved(case, backend="cuda")
    sinks = torch.randn(case.q.shape[1], device="cuda")
    assert error_of(case, decoder, softcap=20.0, sinks=sinks) < 2e-3
    assert error_of(case, decoder, window=200) < 2e-3
    assert error_of(case, decoder, rotate=False) < 2e-3
