"""What went wrong in the field when requests shared an engine, kind by kind, and the test that keeps it out.

| kind | tests |
|---|---|
| foreign text in an answer under eviction and retraction | test_random_steps_mix_no_tokens_and_lose_no_page |
| a workspace sized by a dummy run | test_the_workspace_is_what_the_worst_forward_needs |
| only the first request of a batch is right | test_neighbours_that_come_and_finish_change_nothing |
| sinks of batch element 0, or lost by an operation | test_sinks_are_each_requests_own_and_survive_every_operation |

The first two are laws of the ledger and stand beside its tests.
"""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

from tests.runtime.hf.setup import GROUPED, INT2, VQ, WINDOWS, double, host_of
from tests.tiny import tiny_tokens

MODEL = double()
# transformers renamed the keyword.
CACHE = "cache" if "cache" in inspect.signature(MODEL.forward).parameters else "past_key_values"
LENGTHS = (41, 5, 28)
STEPS = 10
PROMPTS = [tiny_tokens(length + STEPS, seed=length) for length in LENGTHS]


def padded(cache, prompts):
    """Forward prompts of different lengths as one batch, padded on the left; return the mask and the last logits."""
    longest = max(map(len, prompts))
    tokens = torch.stack([torch.cat([torch.zeros(longest - len(p), dtype=torch.int64), p]) for p in prompts])
    mask = torch.stack([(torch.arange(longest) >= longest - len(p)).long() for p in prompts])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = MODEL(tokens, attention_mask=mask, position_ids=positions, **{CACHE: cache})
    return mask, out.logits[:, -1]


def step(cache, mask, tokens):
    """Forward one more token of each request."""
    mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    positions = mask.sum(1, keepdim=True) - 1
    out = MODEL(tokens[:, None], attention_mask=mask, position_ids=positions, **{CACHE: cache})
    return mask, out.logits[:, -1]


def alone(host, number):
    """The logits of one request that has the engine to itself: after its prompt, and after each further token."""
    prompt, cache = PROMPTS[number], host.new_cache()
    mask, last = padded(cache, [prompt[: LENGTHS[number]]])
    found = [last[0]]
    for token in prompt[LENGTHS[number] :]:
        mask, last = step(cache, mask, token[None])
        found.append(last[0])
    return torch.stack(found)


@pytest.mark.parametrize("keys", [INT2, GROUPED, VQ], ids=["int2", "grouped", "vq"])
def test_neighbours_that_come_and_finish_change_nothing(keys):
    with host_of(MODEL, keys) as host:
        wanted = [alone(host, number) for number in range(3)]
        cache, running = host.new_cache(), [0, 1, 2]
        mask, last = padded(cache, [PROMPTS[n][: LENGTHS[n]] for n in running])
        for taken in range(STEPS):
            for row, number in enumerate(running):
                torch.testing.assert_close(last[row], wanted[number][taken], rtol=1e-9, atol=1e-9)
            if taken == 4:  # the second request has finished
                running = [0, 2]
                cache.batch_select_indices(torch.tensor(running))
                mask, last = mask[running], last[running]
            mask, last = step(cache, mask, torch.stack([PROMPTS[n][LENGTHS[n] + taken] for n in running]))
        for row, number in enumerate(running):
            torch.testing.assert_close(last[row], wanted[number][STEPS], rtol=1e-9, atol=1e-9)


def sinks(cache):
    """The exact rows of each request's sinks, all quantized layers: one tensor a request."""
    layers = cache.quantized()
    return [
        torch.cat([side.flatten() for layer in layers for side in layer.requests[row].exact(0, WINDOWS.sink)])
        for row in range(len(layers[0].requests))
    ]


def test_sinks_are_each_requests_own_and_survive_every_operation():
    with host_of(MODEL) as host:
        own = []
        for number, length in enumerate(LENGTHS):
            cache = host.new_cache()
            padded(cache, [PROMPTS[number][:length]])
            own += sinks(cache)
        assert not torch.allclose(own[0], own[1]) and not torch.allclose(own[0], own[2])

        def hold(cache, *numbers):
            found = sinks(cache)
            assert len(found) == len(numbers)
            for rows, number in zip(found, numbers, strict=True):
                torch.testing.assert_close(rows, own[number], rtol=1e-9, atol=1e-9)

        cache = host.new_cache()
        mask, _ = padded(cache, [p[:n] for p, n in zip(PROMPTS, LENGTHS, strict=True)])
        hold(cache, 0, 1, 2)
        for taken in range(STEPS):
            mask, _ = step(cache, mask, torch.stack([p[n + taken] for p, n in zip(PROMPTS, LENGTHS, strict=True)]))
        hold(cache, 0, 1, 2)
        cache.crop(-4)
        hold(cache, 0, 1, 2)
        twin = copy.deepcopy(cache)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        hold(cache, 2, 0, 0)
        cache.batch_repeat_interleave(2)
        hold(cache, 2, 2, 0, 0, 0, 0)
        cache.batch_select_indices(torch.tensor([4, 1]))
        hold(cache, 0, 2)
        hold(twin, 0, 1, 2)
