"""What a model shows when it runs: two short forwards that differ only in their positions."""

from __future__ import annotations

import inspect
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcq.models.attention import AttentionCall, attention_hook, plain_attention
from kvcq.models.library import decoder_config, forward

TOKENS = 16
SHIFT = 37
SHORTEST = TOKENS + SHIFT + 1


@dataclass(frozen=True)
class Observation:
    """Attention calls of random tokens at positions 0..15, and the keys of the same tokens SHIFT positions later.

    Attributes:
        calls: Real layer id -> its calls in order (one, for every model that kvcq supports).
        shifted: Real layer id -> keys [H, 16, d_k] of the shifted run; empty if the model takes no positions.
    """

    calls: dict[int, list[AttentionCall]]
    shifted: dict[int, Tensor]

    def keys(self, layer: int) -> Tensor:
        """Return the keys of the unshifted run, [H, 16, d_k]."""
        return self.calls[layer][0].key[0, :, :TOKENS]


def observe(model: PreTrainedModel, longest: int | None = None) -> Observation:
    """Run the two forwards, without cache, on seeded random tokens.

    RoPE types that change with the sequence length (longrope, dynamic NTK) look at the largest position id. So
    both runs end in one token at position `longest - 1`: it comes last, touches no other row, and puts both
    into the regime of a sequence of that length.
    """
    config = decoder_config(model)
    last = max(longest or 0, SHORTEST) - 1
    if not any("inv_freq" in name for name, _ in model.named_buffers()):
        last = SHORTEST - 1  # a table of learned positions ends somewhere
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (1, TOKENS + 1), generator=generator)
    positions = torch.arange(TOKENS + 1)
    positions[-1] = last
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return Observation(_calls(model, tokens, None), {})
    calls = _calls(model, tokens, positions)
    positions[:-1] += SHIFT
    later = _calls(model, tokens, positions)
    return Observation(calls, {layer: seen[0].key[0, :, :TOKENS] for layer, seen in later.items()})


def _calls(model: PreTrainedModel, tokens: Tensor, positions: Tensor | None) -> dict[int, list[AttentionCall]]:
    calls: dict[int, list[AttentionCall]] = defaultdict(list)

    def hook(call: AttentionCall) -> Tensor:
        calls[call.layer].append(call)
        return plain_attention(call)

    with attention_hook(model, hook):
        forward(model, tokens, positions=positions, last_only=True)
    return dict(calls)
