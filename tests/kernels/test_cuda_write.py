"""Keys in vector codes in CUDA: the source compiles within its registers, its tables, and when it is chosen."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from kvcq.codecs.codebook import nearest
from kvcq.errors import UnsupportedError
from kvcq.kernels.cuda.compile import DEFAULT_SHARED, HEAD_DIMS, KEYS_SOURCES, KeysVariant, source
from kvcq.kernels.cuda.fragments import map_fragments, search_fragments, word_terms
from kvcq.kernels.cuda.write import choose_keys, keys_unserved
from kvcq.kernels.select import Limits
from kvcq.kernels.write import choose_launch
from tests.kernels.test_cuda_compile import REGISTERS, WARP, compiled, needs_nvrtc

HOPPER = Limits((9, 0))
VARIANTS = [choose_keys(d, tokens, 8, 132)[0] for d in HEAD_DIMS for tokens in (1, 8192)]


@needs_nvrtc
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: f"d{variant.head_dim}-team{variant.team}")
def test_every_variant_fits_its_registers_without_spills(variant: KeysVariant) -> None:
    status, log = compiled(source(KEYS_SOURCES), variant)
    assert status == 0, log
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert registers, log
    assert spills and spills.groups() == ("0", "0"), log
    rounded = -(-int(registers[1]) // 8) * 8
    assert rounded * WARP * variant.shape.warps * variant.shape.blocks <= REGISTERS


def test_the_source_knows_how_much_shared_memory_it_has() -> None:
    text = source(KEYS_SOURCES)
    assert "#include" not in text
    assert text.count('extern "C" __global__') == 1
    assert "TILE_WORDS = 132;" in text and "STAGES = 3;" in text
    alone = KeysVariant(128, 1, VARIANTS[-1].shape)
    assert alone.shared_bytes == 4 * 16 * 132 * 4 + 3 * (256 + 64) * 16 <= DEFAULT_SHARED


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
    assert choose_keys(128, 8192, 8, 132)[0].team == 1
    for tokens, parts in ((1, 4), (128, 4), (512, 2), (2048, 1)):
        variant, found = choose_keys(128, tokens, 8, 132)
        assert (variant.team, found) == (8, parts)
    assert choose_keys(64, 1, 8, 132)[0].team == 4


def test_what_is_not_served_is_named() -> None:
    served = torch.bfloat16
    assert keys_unserved(128, True, served, HOPPER) is None
    assert "uniform" in str(keys_unserved(128, False, served, HOPPER))
    assert "head dim 96" in str(keys_unserved(96, True, served, HOPPER))
    assert "float16" in str(keys_unserved(64, True, torch.float16, HOPPER))
    assert "8.0" in str(keys_unserved(64, True, served, Limits((7, 5))))
    assert "8.0" in str(keys_unserved(64, True, served, Limits(None)))


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
