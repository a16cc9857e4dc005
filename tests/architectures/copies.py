"""Copies of llama under types that no list of kvcq or transformers names: a faithful one, and some that cheat.

The module imports nothing of kvcq or the tests, so that a model folder can carry it as its own code.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

CHEATING_LAYER = 1


class CopyConfig(LlamaConfig):
    model_type = "unheard_of"


class CopyForCausalLM(LlamaForCausalLM):
    """Llama under another name."""

    config_class = CopyConfig


class OwnSoftmax(LlamaAttention):
    """Computes attention itself: right, cached, and past every hook."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **options):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            project(hidden_states).view(shape).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        cache = options.get("cache", options.get("past_key_values"))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        key, value = (x.repeat_interleave(self.num_key_value_groups, dim=1) for x in (key, value))
        scores = query @ key.mT * self.scaling
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        output = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value
        return self.o_proj(output.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)), None


class NoMask(LlamaAttention):
    """Drops the mask: every token sees the future."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **options):
        return super().forward(hidden_states, position_embeddings, attention_mask=None, **options)


class ScaledValues(LlamaAttention):
    """Hands other values to attention than it caches."""

    def forward(self, hidden_states, *arguments, **options):
        cache = options.get("cache", options.get("past_key_values"))
        output = super().forward(hidden_states, *arguments, **options)
        if cache is not None:
            cache.layers[self.layer_idx].values = cache.layers[self.layer_idx].values * 2
        return output


class CheatConfig(LlamaConfig):
    model_type = "cheat"


class CheatForCausalLM(LlamaForCausalLM):
    """Llama with another attention in one layer; the configuration's `cheat` names the class."""

    config_class = CheatConfig

    def __init__(self, config):
        super().__init__(config)
        attention = {cls.__name__: cls for cls in (OwnSoftmax, NoMask, ScaledValues)}[config.cheat]
        self.model.layers[CHEATING_LAYER].self_attn = attention(config, CHEATING_LAYER)
