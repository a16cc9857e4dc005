"""Answers depend on a request's own tokens: not on neighbours, padding, order or what was taken back."""

import copy

import pytest
import torch

from kvcq.errors import UnsupportedError
from kvcq.models.library import new_cache
from kvcq.spec.plan import Windows
from tests.runtime.hf.setup import WINDOWS, batch_forward, double, host_of, relative, run
from tests.tiny import tiny_tokens

LENGTHS = (50, 9, 31)


def padded(parts, side):
    """Token ids [B, T] and the mask [B, T] of prompts of different lengths, padded with 0."""
    longest = max(map(len, parts))
    tokens, mask = torch.zeros(len(parts), longest, dtype=torch.long), torch.zeros(len(parts), longest)
    for row, part in enumerate(parts):
        at = slice(longest - len(part), None) if side == "left" else slice(0, len(part))
        tokens[row, at], mask[row, at] = part, 1
    return tokens, mask.long()


def prompts():
    return [tiny_tokens(n, seed=n) for n in LENGTHS]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("chunk", [50, 13])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_is_three_requests_alone(family, chunk, side):
    # Softcap: the sliding layers, the library's own, compute their softmax in float32.
    tolerance = 1e-9 if family == "llama" else 1e-6
    model, parts = double(family), prompts()
    tokens, mask = padded(parts, side)
    with host_of(model) as host:
        batch, alone = host.new_cache(), [host.new_cache() for _ in parts]
        logits = torch.cat(
            [
                batch_forward(model, batch, tokens[:, at : at + chunk], mask[:, : at + chunk])
                for at in range(0, 50, chunk)
            ],
            1,
        )
        for row, part in enumerate(parts):
            wanted = run(model, alone[row], part)[0]
            assert relative(logits[row][mask[row].bool()], wanted) < tolerance
        for whole, *single in zip(batch.quantized(), *(cache.quantized() for cache in alone), strict=True):
            assert [request.length for request in whole.requests] == list(LENGTHS)
            for request, other in zip(whole.requests, single, strict=True):
                assert family != "llama" or torch.equal(request.pages, other.requests[0].pages)


def test_sinks_are_the_first_tokens_of_each_request_whatever_the_slot():
    model, parts = double(), prompts()
    tokens, mask = padded(parts, "left")
    with host_of(model) as host:
        cache, alone = host.new_cache(), host.new_cache()
        batch_forward(model, cache, tokens, mask)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([4, 2, 0, 0, 1, 3]))
        cache.batch_select_indices(torch.tensor([1, 0, 4, 5]))
        for row, source in enumerate((1, 2, 0, 1)):
            alone.reset()
            run(model, alone, parts[source])
            for layer, other in zip(cache.quantized(), alone.quantized(), strict=True):
                found, wanted = layer.requests[row].sinks, other.requests[0].sinks
                assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(found, wanted, strict=True))
                assert found[0].shape[1] == WINDOWS.sink


def test_padding_that_goes_on_while_others_generate_changes_nothing():
    model, parts = double(), prompts()
    tokens, mask = padded(parts, "left")
    with host_of(model) as host:
        cache, alone = host.new_cache(), host.new_cache()
        batch_forward(model, cache, tokens, mask)
        wanted = run(model, alone, parts[2])
        for step in range(12):
            token = tiny_tokens(3, seed=step)[:, None]
            # The first request ended: its new slots are masked out. The second goes on with padding as real tokens.
            mask = torch.cat([mask, torch.tensor([[0], [1], [1]])], 1)
            logits = batch_forward(model, cache, token, mask)
            wanted = run(model, alone, token[2])
            assert relative(logits[2], wanted[0]) < 1e-9
        lengths = [request.length for request in cache.quantized()[0].requests]
    assert lengths == [50, 9 + 12, 31 + 12]


def test_holes_in_a_mask_are_not_stored():
    model, tokens = double(), tiny_tokens(40)
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[0, [0, 7, 8, 20]] = 0
    kept = tokens[mask[0].bool()]
    with host_of(model) as host:
        cache, alone = host.new_cache(), host.new_cache()
        logits = batch_forward(model, cache, tokens[None], mask)
        assert relative(logits[0][mask[0].bool()], run(model, alone, kept)[0]) < 1e-9


def test_a_later_mask_hides_tokens_and_may_not_bring_padding_back():
    model, tokens = double(), tiny_tokens(40)
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[0, :4] = 0
    hidden = mask.clone()
    hidden[0, [10, 30]] = 0
    with host_of(model, windows=Windows(sink=0, recent=64)) as host:
        caches = [host.new_cache(), new_cache(model)]
        found, wanted = (
            torch.cat(
                [
                    batch_forward(model, cache, tokens[None, :30], mask[:, :30]),
                    batch_forward(model, cache, tokens[None, 30:], hidden),
                ],
                1,
            )
            for cache in caches
        )
        # Transforms have float32 entries: orthogonal to that.
        assert relative(found[0, 31:], wanted[0, 31:]) < 1e-5
        shown = torch.cat([mask, torch.ones(1, 1, dtype=torch.long)], 1)
        for revived in (2, slice(None)):
            shown[0, revived] = 1
            with pytest.raises(UnsupportedError, match="padding when they came"):
                batch_forward(model, copy.deepcopy(caches[0]), tokens[None, :1], shown)


def test_copies_are_independent_and_belong_to_the_same_model():
    model, tokens = double(), tiny_tokens(60)
    with host_of(model) as host:
        cache = host.new_cache()
        run(model, cache, tokens[:40])
        twin = copy.deepcopy(cache)
        assert twin.host is host and twin.allocated_bytes() == cache.allocated_bytes()
        first = run(model, cache, tokens[40:])
        run(model, cache, tiny_tokens(20, seed=9))
        assert torch.equal(run(model, twin, tokens[40:]), first)


def test_crop_is_limited_by_the_ring_and_says_by_how_much():
    model, tokens = double(), tiny_tokens(200)
    with host_of(model) as host:
        cache, other = host.new_cache(), host.new_cache()
        run(model, cache, tokens)
        with pytest.raises(UnsupportedError, match=r"cannot take back 66 of 200 tokens.* the last 72 .*take back 65"):
            cache.crop(-66)
        assert cache.get_seq_length() == 200
        cache.crop(-65)
        wanted = run(model, other, tokens)[:, 135:]
        assert relative(run(model, cache, tokens[135:], [1, 30, 34]), wanted) < 1e-9
        cache.crop(-200)
        assert relative(run(model, cache, tokens), run(model, host.new_cache(), tokens)) < 1e-12


def test_a_refused_crop_leaves_every_layer_and_request_as_it_was():
    model = double("gemma3_text", layer_types=["sliding_attention", "full_attention"] * 2)
    parts = [tiny_tokens(120), tiny_tokens(20)]
    tokens, mask = padded(parts, "left")
    with host_of(model) as host:
        cache = host.new_cache()
        batch_forward(model, cache, tokens, mask)
        with pytest.raises(UnsupportedError, match="take back"):
            cache.crop(-90)
        assert {layer.get_seq_length() for layer in cache.layers} == {120}
        assert [request.length for request in cache.quantized()[0].requests] == [120, 20]
