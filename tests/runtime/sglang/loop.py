"""A scheduler of a small SGLang over a tiny model, and the layers that it hands to a backend."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kvcq.models.attention import attention_hook
from kvcq.models.library import forward
from tests.runtime.sglang import small
from tests.runtime.sglang.stage import PAGE


def build(host, tokens=PAGE * 8):
    """Build pool and backend in the order of a model runner."""
    configurator = small.module("sglang.srt.model_executor.pool_configurator").create_memory_pool_configurator
    runner = host.Runner(host.args, host.config, 3, 256)
    sized = configurator(runner)
    if sized != "stock":
        assert sized.calculate_pool_sizes_from_max_tokens(tokens + 5, PAGE).max_total_num_tokens == tokens
    runner.build(tokens)
    return runner, host.backends["kvcq"](runner)


def radix(layer_id, q_heads, kv_heads, d_k, d_v, **changes):
    """``RadixAttention``: a layer as SGLang hands it to a backend."""
    plain = {
        "layer_id": layer_id,
        "tp_q_head_num": q_heads,
        "tp_k_head_num": kv_heads,
        "tp_v_head_num": kv_heads,
        "qk_head_dim": d_k,
        "v_head_dim": d_v,
        "scaling": 0.2,
        "logit_cap": 0.0,
        "logit_capping_method": "tanh",
        "sliding_window_size": -1,
        "is_cross_attention": False,
        "attn_type": SimpleNamespace(value="decoder"),
        "xai_temperature_len": -1,
    }
    return SimpleNamespace(**plain | changes)


class Loop:
    """A scheduler of a small SGLang: prefill batches and decode steps, eager."""

    def __init__(self, host, runner, backend, model):
        self.host, self.runner, self.backend, self.model = host, runner, backend, model
        self.pages = list(range(1, runner.token_to_kv_pool.size // PAGE + 1))

    def prefill(self, parts):
        """Parts are (request, end): its tokens behind what is committed, or behind its prefix, up to `end`."""
        firsts = [req.kv_committed_len or len(req.prefix_indices) for req, _ in parts]
        for (req, end), first in zip(parts, firsts, strict=True):
            req.extend_range = SimpleNamespace(start=first, end=end)
        rows = self.runner.req_to_token_pool.alloc([req for req, _ in parts])
        table = self.runner.req_to_token_pool.req_to_token
        for (req, end), first in zip(parts, firsts, strict=True):
            if not req.kv_committed_len and first:
                table[req.req_pool_idx, :first] = req.prefix_indices
            self._take(req, first, end)
        counts = [end - first for (_, end), first in zip(parts, firsts, strict=True)]
        spans = [range(first, end) for (_, end), first in zip(parts, firsts, strict=True)]
        return self._run(
            small.Mode.EXTEND,
            parts,
            rows,
            spans,
            extend_seq_lens=torch.tensor(counts, dtype=torch.int32),
            extend_seq_lens_cpu=counts,
            extend_prefix_lens_cpu=firsts,
            extend_num_tokens=sum(counts),
            rids=[req.rid for req, _ in parts],
        )

    def decode(self, reqs):
        parts = [(req, req.kv_committed_len + 1) for req in reqs]
        spans = [range(req.kv_committed_len, end) for req, end in parts]
        for (req, end), span in zip(parts, spans, strict=True):
            self._take(req, span.start, end)
        return self._run(small.Mode.DECODE, parts, [req.req_pool_idx for req in reqs], spans)

    def _take(self, req, first, end):
        table = self.runner.req_to_token_pool.req_to_token
        for position in range(first, end):
            page = self.pages.pop(0) if position % PAGE == 0 else int(table[req.req_pool_idx, position - 1]) // PAGE
            table[req.req_pool_idx, position] = page * PAGE + position % PAGE
        req.kv_committed_len = end

    def _run(self, mode, parts, rows, spans, **others):
        table = self.runner.req_to_token_pool.req_to_token
        slots = [table[row, span.start : span.stop].long() for row, span in zip(rows, spans, strict=True)]
        batch = SimpleNamespace(
            forward_mode=mode,
            batch_size=len(parts),
            req_pool_indices=torch.tensor(rows),
            seq_lens=torch.tensor([end for _, end in parts]),
            out_cache_loc=torch.cat(slots),
            **{"extend_seq_lens": None} | others,
        )
        tokens = torch.tensor([req.tokens[i] for (req, _), span in zip(parts, spans, strict=True) for i in span])
        positions = torch.tensor([i for span in spans for i in span])
        self.backend.init_forward_metadata(batch)

        def attend(call):
            heads, (kv_heads, _, d_k) = call.query.shape[1], call.key.shape[1:]
            layer = radix(call.layer, heads, kv_heads, d_k, call.value.shape[-1], scaling=call.scaling)
            q, k, v = (x[0].transpose(0, 1).flatten(1) for x in (call.query, call.key, call.value))
            out = self.backend.forward(q, k, v, layer, batch)
            return out.view(len(tokens), -1, layer.v_head_dim).transpose(0, 1)[None]

        with attention_hook(self.model, attend):
            return forward(self.model, tokens[None], positions=positions)[0]
