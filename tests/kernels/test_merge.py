"""The merge against float64: any split of a softmax, any head dim, learned sinks, means of values."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcq.kernels import merge as merging
from kvcq.kernels.merge import merge, mix_shape
from kvcq.kernels.plan import Partials, Plan
from kvcq.spec.plan import Windows
from tests.kernels.build import Case, build_case, relative_error

WINDOWS = Windows(sink=5, recent=24)
SCALING = 0.3
LIMIT = {torch.float16: 5e-4, torch.float32: 1e-6, torch.bfloat16: 3e-3}


def layer(
    kind: str,
    lengths: list[int],
    group: int,
    d_v: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    d_k: int = 16,
    parts: int = 40,
) -> tuple[Case, Plan, Partials]:
    """A planned step whose partial outputs are random, those of items nobody has are NaN."""
    case = build_case(
        kind, lengths, group=group, d_k=d_k, d_v=d_v, dtype=dtype, device=device, windows=WINDOWS, fill=False
    )
    plan = Plan.reserve(len(lengths) + 1, parts=parts, exact_rows=16, windows=WINDOWS, device=device)
    plan.update(case.requests, WINDOWS)
    partial = Partials.reserve(plan, 2 * group, d_v)
    draw = torch.Generator().manual_seed(1)
    partial.o.copy_(torch.randn(partial.o.shape, generator=draw))
    partial.ml[..., 0] = (torch.randn(partial.ml.shape[:2], generator=draw) * 5).to(device)
    partial.ml[..., 1] = (torch.rand(partial.ml.shape[:2], generator=draw) * 60 + 1).to(device)
    used = int(plan.first[len(lengths)])
    partial.o[used:] = torch.nan
    partial.ml[used:] = torch.nan
    partial.mixed.fill_(torch.nan)
    partial.mass.fill_(torch.nan)
    return case, plan, partial


def expected(
    case: Case, plan: Plan, partial: Partials, sinks: Tensor | None, offset: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """o' and the output, float64."""
    outputs, masses = [], []
    for b in range(case.requests.batch):
        own = slice(int(plan.first[b]), int(plan.first[b + 1]))
        logits = partial.ml[own, :, 0].double() * math.log(2) + partial.ml[own, :, 1].double().log()
        if sinks is not None:
            extra = sinks.double() - (SCALING * offset[b].double() if offset is not None and softcap is None else 0)
            logits = torch.cat([logits, extra[None]])
        count = own.stop - own.start
        weights = torch.softmax(logits, 0)[:count] if len(logits) else logits
        outputs.append((weights[..., None] * partial.o[own].double()).sum(0))
        masses.append(weights.sum(0))
    o, mass = torch.stack(outputs), torch.stack(masses)
    side = case.tables.v
    back = torch.einsum("bhge,hde->bhgd", o.unflatten(1, (side.dual.shape[0], -1)), side.dual.double())
    if side.offset is not None:
        back = back + side.offset.double()[:, None] * mass.unflatten(1, (side.dual.shape[0], -1))[..., None]
    return o, back.flatten(1, 2)


def run(case: Case, plan: Plan, partial: Partials, **options: Any) -> Tensor:
    batch, q_heads = case.query.shape[:2]
    out = torch.full((batch, q_heads, case.tables.v.d), torch.nan, dtype=case.query.dtype, device=case.query.device)
    more = {"sinks": None, "offset": None, "scaling": SCALING, "softcap": None, "rotate": True, **options}
    merge(case.tables, plan, partial, out, **more)
    return out


@pytest.fixture(params=["two launches", "one launch"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "JOINED_ITEMS", 1 << 20 if request.param == "one launch" else 0)


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize(
    ("d_v", "group"),
    [(16, 2), (64, 1), (64, 5), (64, 7), (64, 16), (80, 3), (96, 4), (128, 4), (128, 8), (256, 1), (256, 3)],
)
def test_outputs_of_every_width_and_group(d_v: int, group: int, dtype: torch.dtype, device: torch.device) -> None:
    case, plan, partial = layer("int2", [700, 1, 0], group, d_v, dtype, device)
    wanted = expected(case, plan, partial, None, None, None)
    out = run(case, plan, partial)
    assert relative_error(out, wanted[1]) < LIMIT[dtype]
    assert bool((out[2] == 0).all())
    folded = run(case, plan, partial, rotate=False)
    assert relative_error(folded, wanted[0]) < LIMIT[dtype]


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("kind", ["int2", "centred"])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("shifted", [False, True])
def test_learned_sinks_and_means(
    kind: str, softcap: float | None, shifted: bool, dtype: torch.dtype, device: torch.device
) -> None:
    case, plan, partial = layer(kind, [700, 1, 0], 5, 64, dtype, device)
    sinks = torch.linspace(-3, 8, 10, device=device)
    offset = torch.randn(3, 10, generator=torch.Generator().manual_seed(3)).to(device) * 4 if shifted else None
    wanted = expected(case, plan, partial, sinks, offset, softcap)[1]
    out = run(case, plan, partial, sinks=sinks, offset=offset, softcap=softcap)
    assert relative_error(out, wanted) < LIMIT[dtype]
    assert bool((out[2] == 0).all())


@pytest.mark.usefixtures("cut")
def test_items_that_see_nothing_count_for_nothing(dtype: torch.dtype, device: torch.device) -> None:
    case, plan, partial = layer("centred", [700, 90], 2, 64, dtype, device)
    begin, end = int(plan.first[0]), int(plan.first[1])
    empty = range(begin, end, 2)
    kept = [j for j in range(begin, end) if j not in empty]
    for j in empty:
        partial.o[j], partial.ml[j, :, 0], partial.ml[j, :, 1] = 0.0, -1e30, 0.0
    out = run(case, plan, partial)
    weights = partial.ml[kept, :, 1].double() * torch.exp2(partial.ml[kept, :, 0].double())
    mixed = (weights[..., None] * partial.o[kept].double()).sum(0) / weights.sum(0)[..., None]
    side = case.tables.v
    assert side.offset is not None
    back = torch.einsum("hge,hde->hgd", mixed.unflatten(0, (2, -1)), side.dual.double()) + side.offset.double()[:, None]
    assert relative_error(out[0], back.flatten(0, 1)) < LIMIT[dtype]
    # All of them empty: zeros, not numbers of no meaning.
    partial.o[begin:end], partial.ml[begin:end, :, 0], partial.ml[begin:end, :, 1] = 0.0, -1e30, 0.0
    for sinks in (None, torch.zeros(4, device=device)):
        assert bool((run(case, plan, partial, sinks=sinks)[0] == 0).all())


@pytest.mark.usefixtures("cut")
def test_more_items_than_are_read_at_once(dtype: torch.dtype, device: torch.device) -> None:
    case, plan, partial = layer("centred", [9000, 700], 2, 128, dtype, device, parts=150)
    assert int(plan.first[1]) > 16 * merging.JOIN_ITEMS
    wanted = expected(case, plan, partial, None, None, None)[1]
    assert relative_error(run(case, plan, partial), wanted) < LIMIT[dtype]


@pytest.mark.usefixtures("cut")
def test_outputs_do_not_depend_on_the_neighbours(dtype: torch.dtype, device: torch.device) -> None:
    case, plan, partial = layer("centred", [700, 1, 90], 3, 64, dtype, device)
    before = run(case, plan, partial)
    own = slice(int(plan.first[1]), int(plan.first[2]))
    for tensor in (partial.o, partial.ml):
        held = tensor[own].clone()
        tensor += 1.0
        tensor[own] = held
    assert torch.equal(run(case, plan, partial)[1], before[1])


@pytest.mark.usefixtures("cut")
def test_float32_rows_are_exact(device: torch.device) -> None:
    case, plan, partial = layer("centred", [700, 90], 2, 80, torch.float32, device)
    wanted = expected(case, plan, partial, None, None, None)[1]
    assert relative_error(run(case, plan, partial), wanted) < LIMIT[torch.float32]


@pytest.mark.parametrize(("rows", "share"), [(32, 150), (512, 150), (1024, 150), (1024, 2)])
def test_every_cut_of_the_first_launch_gives_the_same(
    rows: int, share: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for d_v in range(16, 257, 16):
        items, columns = mix_shape(rows, d_v, share)
        assert items >= 1 and columns >= 16 and items * columns <= 4096
    case, plan, partial = layer("centred", [9000, 1, 0], 2, 80, dtype, device, parts=150)
    cut = mix_shape(rows, 80, share)
    monkeypatch.setattr(merging, "mix_shape", lambda *_: cut)
    assert int(plan.first[1]) > 140
    wanted = expected(case, plan, partial, None, None, None)
    assert relative_error(run(case, plan, partial), wanted[1]) < LIMIT[dtype]
    assert relative_error(run(case, plan, partial, rotate=False), wanted[0]) < LIMIT[dtype]


def test_what_does_not_fit_is_refused(dtype: torch.dtype, device: torch.device) -> None:
    case, plan, partial = layer("centred", [70, 90], 2, 64, dtype, device)
    good: dict[str, Any] = {"sinks": None, "offset": None, "scaling": 1.0, "softcap": None, "rotate": True}
    out = torch.zeros(2, 4, 64, dtype=dtype, device=device)
    wrong: tuple[tuple[Tensor, dict[str, Any], str], ...] = (
        (out[0], {}, "shape"),
        (out[:, :3], {}, "3 query heads"),
        (out.repeat(1, 16, 1), {}, "groups have"),
        (out.repeat(3, 1, 1), {}, "6 requests"),
        (out[..., :32], {}, r"\[2, 4, 64\]"),
        (out.double(), {}, "float64"),
        (out.transpose(0, 1).contiguous().transpose(0, 1), {}, "not contiguous"),
        (out, {"sinks": torch.zeros(5, device=device)}, r"sinks has shape \[5\]"),
        (out, {"offset": torch.zeros(2, 3, device=device)}, r"offset has shape \[2, 3\]"),
    )
    for tensor, changes, said in wrong:
        with pytest.raises(ValueError, match=said):
            merge(case.tables, plan, partial, tensor, **{**good, **changes})
