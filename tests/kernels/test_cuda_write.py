"""Write in CUDA: the sources compile within their registers, their tables say what they should, what they serve."""

from __future__ import annotations

import re
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from kvcq.codecs.codebook import nearest
from kvcq.errors import UnsupportedError
from kvcq.kernels import write as writing
from kvcq.kernels.arrays import Tables
from kvcq.kernels.cuda.compile import DEFAULT_SHARED, HEAD_DIMS, RowsVariant, source
from kvcq.kernels.cuda.fragments import map_fragments, search_fragments, word_terms
from kvcq.kernels.cuda.write import choose_rows, device_unserved, keys_unserved, uniform_unserved
from kvcq.kernels.select import Limits, describe
from kvcq.kernels.write import choose_launch, cuda_sides, writers
from tests.kernels.build import build_case
from tests.kernels.test_cuda_compile import REGISTERS, WARP, compiled, needs_nvrtc

HOPPER = Limits((9, 0))
ENTRIES: tuple[Literal["write_keys", "write_uniform"], ...] = ("write_keys", "write_uniform")
VARIANTS = [choose_rows(entry, d, tokens, 8, 132)[0] for entry in ENTRIES for d in HEAD_DIMS for tokens in (1, 8192)]


@needs_nvrtc
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: f"{variant.entry}-d{variant.head_dim}-{variant.team}")
def test_every_variant_fits_its_registers_without_spills(variant: RowsVariant) -> None:
    status, log = compiled(source(variant.sources), variant)
    assert status == 0, log
    assert "warning" not in log
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert registers, log
    assert spills and spills.groups() == ("0", "0"), log
    rounded = -(-int(registers[1]) // 8) * 8
    assert rounded * WARP * variant.shape.warps * variant.shape.blocks <= REGISTERS


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: f"{variant.entry}-d{variant.head_dim}-{variant.team}")
def test_the_sources_need_no_other_file_and_little_shared_memory(variant: RowsVariant) -> None:
    text = source(variant.sources)
    assert "#include" not in text
    assert text.count('extern "C" __global__') == 1
    assert variant.shared_bytes <= DEFAULT_SHARED


def test_the_source_knows_how_much_shared_memory_it_has() -> None:
    text = source(("rows.cuh", "uniform.cuh", "write_keys.cu"))
    assert "TILE_WORDS = 132;" in text and "STAGES = 3;" in text
    alone = choose_rows("write_keys", 128, 8192, 8, 132)[0]
    assert alone.shared_bytes == 4 * 16 * 132 * 4 + 3 * (256 + 64) * 16


def test_a_map_is_ordered_as_its_product_takes_it() -> None:
    d = 64
    matrix = torch.randn(2, d, d).bfloat16()
    found = map_fragments(matrix).view(torch.bfloat16)  # [H, tile, two steps, lane, 8]
    for tile, pair, lane, register, e in ((0, 0, 0, 0, 0), (3, 1, 13, 2, 1), (7, 1, 31, 3, 0), (5, 0, 6, 1, 1)):
        row = 32 * pair + 16 * (register // 2) + 8 * (register % 2) + 2 * (lane % 4) + e
        assert torch.equal(found[:, tile, pair, lane, 2 * register + e], matrix[:, row, 8 * tile + lane // 4])


def codebook(groups: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    words = torch.randint(-127, 128, (1, groups, 256, 4), generator=draw).to(torch.int8)
    words[:, :, 200:] = words[:, :, :1]  # words that do not exist repeat the first one
    return words.view(torch.int32)[..., 0], 0.02 + 0.01 * torch.rand(1, groups, generator=draw)


def searched(table: Tensor, rows: Tensor, rho: Tensor, odd: bool) -> Tensor:
    """The best run of four words as the source finds it: scores ``[n, 256]`` from registers, then keys."""
    halves = table[:1024].view(torch.float16).view(8, 32, 4, 2).double()
    left = rho[:, None].expand(-1, 4).double()
    a = torch.cat([left, rows.double()] if odd else [rows.double(), left], 1)
    keys = []
    for quad in range(4):
        for step in range(8):
            for run in range(2):
                lanes = [4 * (2 * quad + e) + k for e in range(2) for k in range(4)]
                pair = halves[step, lanes][:, 2 * run : 2 * run + 2].reshape(2, 4, 2, 2)
                four = pair.permute(2, 0, 1, 3).reshape(4, 8)
                scores = (a @ four.mT + 513).float().view(torch.int32).amax(1).clamp(min=0x44000000)
                index = 4 * (2 * step + run) + quad
                keys.append(scores.long() * 64 % 2**32 + 63 - index)
    return 63 - torch.stack(keys).amax(0) % 64


@pytest.mark.parametrize("odd", [False, True])
def test_the_best_run_holds_the_nearest_word(odd: bool) -> None:
    book, scale = codebook(2)
    draw = torch.Generator().manual_seed(4)
    rho = 8 + 8 * torch.rand(3000, generator=draw).half().float()
    rows = (torch.randn(3000, 4, generator=draw) * rho[:, None]).bfloat16().float()
    rows[0] = 0
    rows[1] = 11.3 * 8
    table = search_fragments(book, scale)[0, int(odd)]
    words = book[..., None].view(torch.int8).float()[0] * scale[0, :, None, None]
    wanted = nearest((rows / rho[:, None])[None], words[int(odd)][None])[0].long()
    found = searched(table, rows, rho, odd)
    assert (found != wanted // 4).float().mean() < 1e-3
    assert int(found.max()) < 50
    assert torch.equal(table[1024:], book[0, int(odd)])


def test_the_word_nearest_to_zero_scores_zero_and_others_less_at_zero() -> None:
    book, scale = codebook(4)
    terms = word_terms(book, scale).double()
    center = book[..., None].view(torch.int8).int().square().sum(-1).argmin(-1)
    assert terms.gather(2, center[..., None, None].expand(-1, -1, 1, 8)).eq(0).all()
    constant = terms[..., 4:].sum(-1)
    assert constant.le(0).all()
    norms = book[..., None].view(torch.int8).double().square().sum(-1)
    exact = (norms.amin(-1, keepdim=True) - norms) * scale.double()[..., None] / 2
    torch.testing.assert_close(constant, exact, rtol=1e-9, atol=1e-7)


def test_long_prompts_have_warps_of_their_own() -> None:
    for entry in ENTRIES:
        assert choose_rows(entry, 128, 8192, 8, 132)[0].team == 1
    for tokens, parts in ((1, 4), (128, 4), (512, 2), (1024, 1)):
        variant, found = choose_rows("write_keys", 128, tokens, 8, 132)
        assert (variant.team, found) == (8, parts)
        assert choose_rows("write_uniform", 128, tokens, 8, 132) == (
            RowsVariant("write_uniform", 128, 8, variant.shape),
            1,
        )
    assert choose_rows("write_keys", 64, 1, 8, 132)[0].team == 4


@pytest.mark.parametrize(
    ("kind", "d_k", "d_v", "wanted"),
    [
        ("vq", 64, 64, (True, True)),
        ("vq", 64, 128, (True, True)),
        ("vq", 64, 48, (True, False)),
        ("vq", 32, 64, (False, False)),
        ("vq_groups", 64, 64, (True, False)),
        ("int2", 64, 64, (True, True)),
        ("int2", 64, 128, (False, False)),
        ("int2", 32, 32, (False, False)),
        ("groups", 64, 64, (False, False)),
        ("int4", 64, 64, (False, False)),
        ("lloyd", 64, 64, (False, False)),
    ],
)
def test_what_cuda_writes(kind: str, d_k: int, d_v: int, wanted: tuple[bool, bool]) -> None:
    tables = build_case(kind, [1], d_k=d_k, d_v=d_v, dtype=torch.float16, device=torch.device("cpu"), fill=False).tables
    assert cuda_sides(tables, torch.bfloat16, HOPPER) == wanted
    assert cuda_sides(tables, torch.float16, HOPPER) == (False, False)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("int2", "cuda"), ("vq", "cuda"), ("vq_groups", "cuda (keys) and triton (values)"), ("groups", "triton")],
)
def test_the_layer_its_dtype_and_the_device_say_who_writes(
    kind: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = build_case(kind, [1], d_k=128, dtype=torch.float16, device=torch.device("cpu"), fill=False).tables
    here = torch.device("cpu")
    assert writers(tables, torch.bfloat16, here) == "triton"
    monkeypatch.setattr(writing, "_limits", lambda device: HOPPER)
    monkeypatch.setattr(writing, "_without_cuda", lambda: None)
    assert writers(tables, torch.bfloat16, here) == wanted
    assert writers(tables, torch.float16, here) == "triton"
    # What `kvcq env` says of layers like these.
    if not kind.endswith("groups"):
        told = dict(describe(HOPPER, None))["VQ write" if tables.vq else "INT2 write"]
        assert told.startswith(f"{wanted} (")
    monkeypatch.setattr(writing, "_without_cuda", lambda: "cuda.core is not installed")
    assert writers(tables, torch.bfloat16, here) == "triton"


def test_where_nobody_says_who_writes_each_side_goes_to_whom_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    case = build_case("vq", [2], d_k=64, dtype=torch.float16, device=torch.device("cpu"), fill=False)
    options: dict[str, Any] = {
        "slots": torch.full((2,), -1),
        "positions": torch.zeros(2, dtype=torch.int32),
        "requests": torch.zeros(2, dtype=torch.int32),
        "batch": case.requests,
        "rows": None,
        "windows": True,
        "clamped": torch.zeros(1, dtype=torch.int64),
    }
    monkeypatch.setattr(writing, "write_rows", lambda *_, values: launched.append("both" if values else "keys"))
    monkeypatch.setattr(writing, "chosen_sides", lambda *_: (True, True))
    writing.write(case.tables, case.cache, case.k[0], case.v[0], **options)
    assert launched == ["both"]
    with pytest.raises(UnsupportedError, match="no CUDA kernel writes this layer"):
        writing.write(case.tables, case.cache, case.k[0], case.v[0], **options, backend="cuda")
    writing.write(case.tables, case.cache, case.k[0], case.v[0], **options, backend="triton")
    assert launched == ["both"]


def test_what_is_not_served_is_named() -> None:
    def tables(kind: str, d: int) -> Tables:
        return build_case(kind, [1], d_k=d, d_v=d, dtype=torch.float16, device=torch.device("cpu"), fill=False).tables

    assert "head dim 32" in str(keys_unserved(tables("vq", 32)))
    assert "uniform" in str(keys_unserved(tables("int2", 64)))
    assert "4 bits" in str(uniform_unserved(tables("int4", 64).v))
    assert device_unserved(torch.bfloat16, HOPPER) is None
    assert "float16" in str(device_unserved(torch.float16, HOPPER))
    for limits in (Limits((7, 5)), Limits(None), Limits((9, 0), hip="6.0")):
        assert "8.0" in str(device_unserved(torch.bfloat16, limits))


def test_launches_fit_the_shared_memory_of_a_device() -> None:
    assert choose_launch(128, 128, vq=True).stages == 2
    # 99 KiB and 64 KiB.
    for shared in (101376, 65536):
        for d in range(16, 257, 16):
            for vq in (False, True):
                launch = choose_launch(d, d, vq, shared)
                assert launch.shared_bytes(d, d, vq) <= shared
                assert not (vq and launch.stages == 1 and launch.warps == 4)
    with pytest.raises(UnsupportedError, match="the device has 16384"):
        choose_launch(256, 256, vq=True, shared=16384)
