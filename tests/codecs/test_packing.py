import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvcq.codecs.packing import (
    block_bytes,
    decode_pages,
    encode_pages,
    pack2,
    pack4,
    page_views,
    row_bytes,
    unpack2,
    unpack4,
)

DIMS = st.integers(1, 16).map(lambda n: 16 * n)
SEEDS = st.integers(0, 2**20)


def codes(seed: int, *shape: int) -> Tensor:
    return torch.randint(0, 4, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(DIMS, SEEDS)
def test_pack_and_unpack_are_inverse(d: int, seed: int) -> None:
    c = codes(seed, 3, d)
    packed = pack2(c)
    assert packed.shape == (3, d // 4)
    assert torch.equal(unpack2(packed), c)
    channel = seed % d
    assert int(packed[0, channel % (d // 4)]) >> (2 * (channel // (d // 4))) & 3 == int(c[0, channel])


def test_all_bytes_survive_and_channels_are_strided() -> None:
    every = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    assert torch.equal(pack2(unpack2(every)), every)
    assert pack2(torch.tensor([1, 2, 3, 0, 0, 1, 2, 3], dtype=torch.uint8)).tolist() == [141, 210]
    assert unpack2(torch.tensor([0b11100100], dtype=torch.uint8)).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="whole bytes"):
        pack2(codes(0, 2, 6))


@given(st.integers(0, 200), DIMS, DIMS, st.sampled_from([1, 4]), SEEDS)
def test_pages_hold_any_number_of_tokens(tokens: int, d_k: int, d_v: int, groups: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randint(0, 256, (2, tokens, d // 4), dtype=torch.uint8, generator=g) for d in (d_k, d_v))
    affine = torch.randn(2, tokens, groups, 4, generator=g).half()
    pages = encode_pages(k, v, affine)
    assert pages.shape == (-(-tokens // 64), 2, block_bytes(d_k, d_v, groups))
    for got, want in zip(decode_pages(pages, tokens, d_k, d_v, groups), (k, v, affine), strict=True):
        assert torch.equal(got, want)
    if tokens % 64:
        padding = decode_pages(pages, pages.shape[0] * 64, d_k, d_v, groups)
        assert all(not part[:, tokens:].any() for part in padding)


@pytest.mark.parametrize(("d", "size"), [(64, 2560), (128, 4608)])
def test_allocated_bytes_of_a_block(d: int, size: int) -> None:
    pages = encode_pages(codes(0, 2, 64, d // 4), codes(1, 2, 64, d // 4), torch.zeros(2, 64, 1, 4).half())
    assert pages.untyped_storage().nbytes() == 2 * size == 2 * block_bytes(d, d, 1)
    assert size == 64 * (d // 4 + d // 4 + 8)


def test_every_byte_of_a_block_has_its_place() -> None:
    d, tokens = 32, 70
    g = torch.Generator().manual_seed(1)
    k, v = (torch.randint(0, 256, (1, tokens, 8), dtype=torch.uint8, generator=g) for _ in range(2))
    affine = torch.randn(1, tokens, 4, 4, generator=g).half()
    block = encode_pages(k, v, affine)[1, 0]
    t, b = 3, 5
    assert block[8 * t + b] == k[0, 64 + t, b]
    assert block[64 * 8 + 64 * b + t] == v[0, 64 + t, b]
    start = 64 * 2 * (d // 4) + 32 * t
    assert torch.equal(block[start : start + 32].clone().view(torch.float16), affine[0, 64 + t].flatten())


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    k, affine = codes(0, 1, 5, 16), torch.zeros(1, 5, 1, 4).half()
    with pytest.raises(ValueError, match="divisible by 16"):
        encode_pages(codes(0, 1, 5, 6), k, affine)
    with pytest.raises(ValueError, match="do not fit"):
        encode_pages(k, codes(0, 1, 6, 16), affine)
    with pytest.raises(ValueError, match="do not fit"):
        encode_pages(k, k, affine.float())
    pages = encode_pages(k, k, affine)
    for tokens, groups in ((65, 1), (-1, 1), (5, 4)):
        with pytest.raises(ValueError, match="do not hold"):
            decode_pages(pages, tokens, 64, 64, groups)


@given(DIMS, SEEDS)
def test_four_bits_fill_bytes_by_halves(d: int, seed: int) -> None:
    c = torch.randint(0, 16, (3, d), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = pack4(c)
    assert packed.shape == (3, d // 2)
    assert torch.equal(unpack4(packed), c)
    channel = seed % d
    assert int(packed[0, channel % (d // 2)]) >> (4 * (channel // (d // 2))) & 15 == int(c[0, channel])


def test_blocks_of_four_bits() -> None:
    with pytest.raises(ValueError, match="whole bytes"):
        pack4(torch.zeros(2, 3, dtype=torch.uint8))
    assert row_bytes(128) == 32
    assert block_bytes(64, 128, 1, (4, 2)) == 64 * (32 + 32 + 8) == block_bytes(128, 128, 1)
    pages = torch.arange(2 * block_bytes(16, 32, 4, (4, 2)), dtype=torch.int64).to(torch.uint8).view(2, 1, -1)
    k, v, words = page_views(pages, 16, 32, 4, (4, 2))
    assert (k.shape, v.shape, words.shape) == ((2, 1, 64, 8), (2, 1, 64, 8), (2, 1, 64, 4, 4))
    with pytest.raises(ValueError, match="do not hold"):
        page_views(pages, 16, 32, 4)
