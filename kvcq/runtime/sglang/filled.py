"""Contexts that nobody computed, for benchmarks: random rows stand in for the beginning of a prompt.

Decoding behind a long context is timed without prefilling it. A server does so only if it was started with
``--json-model-override-args '{"kvcq_bench": {"filled": true}}'``, whichever attention backend it has; then a request
says with ``sampling_params.custom_params = {"kvcq_filled": n}`` that its first n tokens are to be there. When it is
about to be scheduled they get slots of their own from SGLang's allocator and a branch of their own in its radix tree,
as if an earlier request had left them; from there on everything is SGLang's usual way of a prefix hit. The pool was
filled with random rows, or codes and scales, before the first of them: the time of attention does not depend on what
they are. Requests share slots only where their prompts begin with the same pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvcq.codecs.packing import PAGE_TOKENS, page_views
from kvcq.runtime.sglang.settings import overrides
from kvcq.runtime.sglang.store import SinkStore

KEY, FLAG, PARAM = "kvcq_bench", "filled", "kvcq_filled"
TARGET = "sglang.srt.managers.schedule_batch.Req.init_next_round_input"
# Scales of codes; biases put the codes 0 .. 3 around zero.
SCALE, SPREAD = 0.5, 0.25


class Filler:
    """What one scheduler fills. Every process has one; it does nothing unless the server was started for it."""

    def __init__(self) -> None:
        self._on: bool | None = None
        self._noisy = False

    def before(self, req: Any, tree: Any, store: SinkStore | None) -> None:
        """Before ``Req.init_next_round_input``: make the tokens that a request calls filled be there.

        Where the pool has no room for all of the request, nothing is done. As a rule SGLang finds none either and asks
        again later; where its own estimate lets the request in, the context is prefilled, and `cached_tokens` says so.

        Args:
            req: SGLang's ``Req``.
            tree: Its radix tree, None where a prefill goes on.
            store: Of kvcq's pool; None in a server with another.
        """
        if tree is None or getattr(tree, "disable", False) or not self._asked():
            return
        wanted = _wanted(req) // PAGE_TOKENS * PAGE_TOKENS
        if wanted:
            self._place(req, tree, store, wanted)

    def _asked(self) -> bool:
        if self._on is None:
            from sglang.srt.server_args import get_global_server_args

            self._on = asked(overrides(get_global_server_args().json_model_override_args))
        return self._on

    def _place(self, req: Any, tree: Any, store: SinkStore | None, wanted: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        # Keys of the tree are compared with each other by their type too.
        ids, allocator = array("q", req.origin_input_ids[:wanted]), tree.token_to_kv_pool_allocator

        def match() -> Tensor:
            found: Tensor = tree.match_prefix(MatchPrefixParams(key=RadixKey(ids, req.extra_key))).device_indices
            return found

        def keep_sinks() -> None:
            if store is not None:
                store.plant(ids, req.extra_key)

        if len(match()) == wanted:
            keep_sinks()
            return
        rest = len(req.origin_input_ids) - wanted + req.sampling_params.max_new_tokens + 2 * PAGE_TOKENS
        if allocator.available_size() + tree.evictable_size() < wanted + rest:
            return
        if not self._noisy:
            fill_pool(allocator.get_kvcache())
            self._noisy = True
        if allocator.available_size() < wanted:
            tree.evict(EvictParams(num_tokens=wanted - allocator.available_size()))
        # Asked again: what was evicted may be what was found.
        found = match()
        slots = allocator.alloc(wanted - len(found))
        if slots is not None:
            slots = torch.cat([found.to(torch.int64), slots.to(torch.int64)])
            tree.insert(InsertParams(key=RadixKey(ids, req.extra_key), value=slots))
            keep_sinks()


def asked(given: Mapping[str, Any]) -> bool:
    """Tell whether a server was started to fill contexts, by its ``--json-model-override-args``."""
    own = given.get(KEY)
    return isinstance(own, dict) and own.get(FLAG) is True


def _wanted(req: Any) -> int:
    params = getattr(req.sampling_params, "custom_params", None)
    value = params.get(PARAM) if isinstance(params, Mapping) else None
    return max(0, min(value, len(req.origin_input_ids))) if type(value) is int else 0


def fill_pool(pool: Any) -> None:
    """Fill a pool with random rows: kvcq's pages and windows, or the BF16 rows of a stock pool.

    Raises:
        TypeError: a pool of another kind.
    """
    if isinstance(getattr(pool, "store", None), SinkStore):
        for pages in pool.pages:
            fill_pages(pages, pool.head_dim, pool.v_head_dim)
        windows = pool.windows
        for rows in (windows.sink_k, windows.sink_v, windows.ring_k, windows.ring_v):
            rows.normal_()
        return
    if not hasattr(pool, "k_buffer") or not hasattr(pool, "v_buffer"):
        raise TypeError(f"{type(pool).__name__} has no rows of keys and values to fill")
    for rows in (*pool.k_buffer, *pool.v_buffer):
        rows.normal_()


def fill_pages(pages: Tensor, d_k: int, d_v: int) -> None:
    """Fill pages uint8 ``[pages, H, block bytes]`` with random codes, and with scales and biases that are usual."""
    codes = (d_k + d_v) // 4
    groups = (pages.shape[-1] // PAGE_TOKENS - codes) // 8
    words = page_views(pages, d_k, d_v, groups)[2]
    pages.random_(0, 256)
    for scale in (0, 2):
        words[..., scale].uniform_(SCALE * (1 - SPREAD), SCALE * (1 + SPREAD))
        words[..., scale + 1].copy_(words[..., scale]).mul_(-1.5)
