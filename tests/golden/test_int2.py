"""By hand: INT2 codes of the row x, in both metadata modes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvcq.codecs.clip import clip_rows, rank_threshold
from kvcq.codecs.packing import pack2
from kvcq.codecs.uniform import decode_uniform, encode_uniform
from kvcq.spec.codec import Metadata, Spacing
from tests.golden.reference import close, golden

WANT: dict[str, Any] = golden()["int2"]
X = torch.tensor(golden()["int2_row_x"], dtype=torch.float32)
CASES = [("noclip", 1.0, 1), ("ratio0.96", 0.96, 1), ("ratio0.75_sort", 0.75, 1), ("ratio0.75_group4", 0.75, 2)]
MODES: tuple[Metadata, ...] = ("fp32-zero", "fp16-bias")


def code(row: Tensor, ratio: float, groups: int, mode: Metadata) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    codes, scale, bias, _ = encode_uniform(clip_rows(row, ratio), groups, 2, mode)
    return codes, scale, bias, decode_uniform(codes, scale, bias, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "ratio", "groups"), CASES)
def test_codes_and_bytes(name: str, ratio: float, groups: int, mode: Metadata) -> None:
    codes, _, _, decoded = code(X, ratio, groups, mode)
    assert codes.tolist() == WANT[name]["codes"]
    assert pack2(codes).tolist() == WANT[name]["bytes"]
    close(decoded, WANT[name]["dequant"], 2e-7 if mode == "fp32-zero" else 2e-3)


@pytest.mark.parametrize(("name", "ratio", "groups"), CASES)
def test_exact_metadata(name: str, ratio: float, groups: int) -> None:
    _, scale, zero, _ = code(X, ratio, groups, "fp32-zero")
    want = WANT[name]
    pairs = want.get("scales_zeros") or [want["scale"], want["zero"]]
    close(torch.stack([scale, zero], -1).flatten(), pairs, 2e-7)


def test_rank_threshold() -> None:
    close(rank_threshold(X, 0.75), [WANT["ratio0.75_sort"]["thr"]])
    assert clip_rows(X, 0.96) is X


@pytest.mark.parametrize("mode", MODES)
def test_ties_round_half_up(mode: Metadata) -> None:
    want = WANT["tie_case"]
    codes, *_ = code(torch.tensor(want["x"], dtype=torch.float32), 1.0, 1, mode)
    assert codes.tolist() == want["codes_half_up"] != want["codes_half_even"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "value"), [("constant_row_0.5", 0.5), ("zero_row", 0.0)])
def test_constant_rows_survive(name: str, value: float, mode: Metadata) -> None:
    codes, scale, bias, decoded = code(torch.full((8,), value), 1.0, 1, mode)
    assert codes.tolist() == WANT[name]["codes"]
    assert decoded.tolist() == [value] * 8
    stored = (scale.item(), bias.item())
    assert stored == ((WANT[name]["scale"], WANT[name]["zero"]) if mode == "fp32-zero" else (0.0, value))


LLOYD: dict[Spacing, tuple[float, float, list[float]]] = {
    "lloyd-main": (0.84535222, 1.26341223, [-1.0680283, -0.2226761, 0.6226761, 1.4680283]),
    "lloyd-nova": (0.71525718, 1.22038030, [-0.8728858, -0.1576286, 0.5576286, 1.2728858]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spacing", LLOYD)
def test_lloyd_max_on_the_clipped_row(spacing: Spacing, mode: Metadata) -> None:
    """Mean 0.2, standard deviation 0.72413744; both releases give these codes and differ in the levels."""
    want_scale, want_zero, levels = LLOYD[spacing]
    codes, scale, bias, _ = encode_uniform(clip_rows(X, 0.75), 1, 2, mode, spacing)
    assert codes.tolist() == [1, 1, 2, 3, 0, 2, 1, 2]
    assert pack2(codes).tolist() == [73, 173]
    zero = bias if mode == "fp32-zero" else -bias.double() / scale.double()
    tolerance = 2e-7 if mode == "fp32-zero" else 1e-3
    close(scale, [want_scale], tolerance)
    close(zero, [want_zero], tolerance)
    close(decode_uniform(codes, scale, bias, mode), [levels[code] for code in codes], tolerance)
