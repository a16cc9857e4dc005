"""Keys by channel over groups of tokens: groups lie at fixed positions, and a coded key's group is always complete."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvcq.codecs.pair import HeadCodec
from kvcq.codecs.side import SideCodec
from kvcq.codecs.token_group import group_begin, group_end, token_group_hat
from kvcq.codecs.windows import oldest_by_query
from kvcq.errors import UnsupportedError
from kvcq.evaluation.rows import mixed_rows
from kvcq.spec.codec import CodecSpec
from kvcq.spec.geometry import LayerGeometry
from kvcq.spec.plan import LayerPlan, Windows

SINK, SIZE, D = 4, 8, 16


def spec(promoted: float = 0.0, size: int = SIZE) -> CodecSpec:
    return CodecSpec(quantizer="token_group", group_tokens=size, group_start=SINK, promoted=promoted)


def keys(tokens: int, seed: int = 0) -> Tensor:
    draw = torch.randn(2, tokens, D, generator=torch.Generator().manual_seed(seed))
    return draw * torch.linspace(0.2, 3.0, D)


@given(st.integers(0, 300), st.integers(1, 64), st.integers(0, 80))
def test_a_position_lies_between_the_borders_of_its_group(position: int, size: int, start: int) -> None:
    given_spec = CodecSpec(quantizer="token_group", group_tokens=size, group_start=start)
    begin, end = group_begin(position, given_spec), group_end(position, given_spec)
    assert begin <= position <= end < position + size
    for border in (begin, end):
        assert border == position if position < start else (border - start) % size == 0
    assert group_end(position + 1, given_spec) - begin <= size


@given(st.integers(1, 64), st.integers(0, 80), st.integers(0, 64), st.integers(0, 400))
def test_a_key_that_is_read_coded_has_its_whole_group_in_the_cache(size: int, sink: int, more: int, query: int) -> None:
    given_spec = CodecSpec(quantizer="token_group", group_tokens=size, group_start=sink)
    oldest = int(oldest_by_query(query, 1, Windows(sink=sink, recent=size + more))[0])
    for key in range(sink, oldest):
        assert group_end(key + 1, given_spec) <= query


@pytest.mark.parametrize("promoted", [0.0, 0.25])
def test_a_group_depends_on_nothing_but_its_rows(promoted: float) -> None:
    x = keys(3 * SIZE)
    whole = token_group_hat(x, SINK, spec(promoted))
    for group in range(3):
        part = slice(group * SIZE, (group + 1) * SIZE)
        assert torch.equal(token_group_hat(x[:, part], SINK + group * SIZE, spec(promoted)), whole[:, part])
    assert torch.equal(token_group_hat(x[:, : SIZE + 3], SINK, spec(promoted))[:, :SIZE], whole[:, :SIZE])


def test_errors_are_bounded_by_half_a_step_of_the_channel() -> None:
    x = keys(2 * SIZE)
    hat = token_group_hat(x, SINK, spec())
    for group in (slice(0, SIZE), slice(SIZE, 2 * SIZE)):
        rows = x[:, group]
        width = rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)
        assert ((hat[:, group] - rows).abs() <= width / 6 + 2e-3 * (1 + rows.abs().amax())).all()


def test_promoted_channels_are_the_strongest_of_each_group_and_head() -> None:
    x = keys(2 * SIZE)
    x[1, SIZE:] = x[1, SIZE:].flip(-1)
    plain, fine = token_group_hat(x, SINK, spec()), token_group_hat(x, SINK, spec(0.25))
    changed = (plain != fine).unflatten(1, (2, SIZE)).any(2)
    strongest = x.unflatten(1, (2, SIZE)).abs().mean(2).topk(4, -1).indices
    for head in range(2):
        for group in range(2):
            assert set(changed[head, group].nonzero().flatten().tolist()) <= set(strongest[head, group].tolist())
    assert (fine - x).square().sum() < (plain - x).square().sum()


def test_rows_inside_a_group_are_refused_and_sinks_come_back_as_they_are() -> None:
    x = keys(SINK + SIZE)
    with pytest.raises(ValueError, match="position 5, inside a group of 8 tokens"):
        token_group_hat(x, SINK + 1, spec())
    hat = token_group_hat(x, 0, spec())
    assert torch.equal(hat[:, :SINK], x[:, :SINK])
    assert torch.equal(hat[:, SINK:], token_group_hat(x[:, SINK:], SINK, spec()))
    codec = SideCodec.build("k", spec(), (2, D), {})
    assert codec.hat(x[:, :0], torch.arange(0)).shape == (2, 0, D)
    with pytest.raises(UnsupportedError, match="codes groups of tokens"):
        codec.encode(x)


@pytest.mark.parametrize("stop", [SINK + 1, SINK + SIZE, SINK + SIZE + 3, 40])
def test_mixed_rows_complete_the_last_group(stop: int) -> None:
    """The twin of a row is that of its whole group, wherever the coded range ends."""
    geometry = LayerGeometry(layer=0, kind="full", q_heads=2, kv_heads=2, d_k=D, d_v=D)
    codec = HeadCodec.build(LayerPlan(layer=0, k=spec(), v=CodecSpec()), geometry, {})
    k = keys(40)
    whole = token_group_hat(k[:, SINK:], SINK, spec())
    rows = mixed_rows(codec, k, k, SINK, stop)
    assert rows.keys_hat.shape == rows.values_hat.shape == (2, stop - SINK, D)
    assert torch.equal(rows.keys_hat, whole[:, : stop - SINK])
    assert codec.block(SINK + 3) == (SINK, SINK + SIZE)
