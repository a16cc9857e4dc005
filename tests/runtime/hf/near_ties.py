"""Greedy answers of several implementations of one cache: equal, up to near-ties of the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcq.models.library import forward
from tests.runtime.hf.setup import batch_forward


@dataclass(frozen=True)
class Agreement:
    """How the logits of an answer compare with the reference's at the same tokens."""

    ties: int
    largest: float
    mean: float


def agreement(found, reference):
    """Compare logits [n, vocab] step by step, teacher-forced with the tokens of `found`.

    Another arg-max is a near-tie where the reference's two best lie within twice the largest difference of the step;
    anything else is an error.
    """
    difference = (found.double() - reference.double()).abs()
    best = reference.double().topk(2, -1).values
    other = found.argmax(-1) != reference.argmax(-1)
    assert bool(((best[:, 0] - best[:, 1])[other] <= 2 * difference.amax(-1)[other]).all())
    return Agreement(int(other.sum()), float(difference.max()), float(difference.mean()))


def follow(model, cache, prompts, steps, *, forced=None):
    """Answer a batch of prompts greedily, left-padded, or along `forced` [B, steps].

    Returns the tokens [B, steps] and the logits that chose them [B, steps, vocab].
    """
    longest = max(map(len, prompts))
    tokens, mask = torch.zeros(len(prompts), longest, dtype=torch.long), torch.zeros(len(prompts), longest).long()
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
    chosen, logits = [], []
    for step in range(steps):
        logits.append(batch_forward(model, cache, tokens, mask)[:, -1])
        tokens = (logits[-1].argmax(-1) if forced is None else forced[:, step])[:, None]
        mask = torch.cat([mask, torch.ones_like(tokens)], 1)
        chosen.append(tokens)
    return torch.cat(chosen, 1), torch.stack(logits, 1)


def check_answers(model, hosts, reference, prompts, steps):
    """Follow prompts with the hosts (packed, simulated) alone and as one batch, and the packed answers by `reference`.

    Args:
        model: The model of the hosts.
        hosts: The packed host and the simulating one.
        reference: Logits [1, T, vocab] of tokens [T] from one exact pass.
        prompts: Token ids.
        steps: Tokens to generate.

    Returns:
        For each prompt its `Agreement` with the reference and with itself in the batch.
    """
    packed, simulated = hosts
    whole, whole_logits = follow(model, packed.new_cache(), prompts, steps)
    results = []
    for row, prompt in enumerate(prompts):
        answer, logits = follow(model, packed.new_cache(), [prompt], steps)
        again, same = follow(model, simulated.new_cache(), [prompt], steps)
        assert torch.equal(answer, again) and torch.equal(logits, same)
        if not torch.equal(whole[row], answer[0]):
            # They parted: compare along the same tokens.
            forced = whole.clone()
            forced[row] = answer[0]
            whole_logits = follow(model, packed.new_cache(), prompts, steps, forced=forced)[1]
        tokens = torch.cat([prompt, answer[0, :-1]])
        exact = reference(tokens)[0, len(prompt) - 1 :]
        found = agreement(logits[0], exact)
        # The rule above holds of any other arg-max; a cache that is off would be as far away as the model itself.
        assert 2 * found.mean < agreement(plain_logits(model, tokens)[0, len(prompt) - 1 :], exact).mean
        results.append((found, agreement(whole_logits[row], logits[0])))
    return results


def plain_logits(model, tokens):
    """Logits of the model without any cache, to see how far quantization moves them."""
    return forward(model, tokens[None])
