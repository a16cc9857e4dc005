"""The hooks of a scheduler's requests: each one tells the store of the one pool of this process.

Functions take what SGLang's hooks take: an ``around`` the original first, an ``after`` the result first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvcq.errors import MismatchError
from kvcq.runtime.sglang.store import Prefill, SinkStore

_STORES: list[SinkStore] = []


def install(store: SinkStore) -> None:
    """Make a store that of this process: its scheduler has one pool.

    Raises:
        MismatchError: there is one already.
    """
    if _STORES:
        raise MismatchError("a second pool in one process: hooks could not tell whose requests they see", where="pool")
    _STORES.append(store)


def uninstall() -> None:
    """Forget the store of this process; there may be none."""
    _STORES.clear()


def match_cap(original: Callable[..., int], self: Any, input_len: int) -> int:
    """Around ``Req._compute_max_prefix_len``: return how many tokens of a request may come from the cache."""
    most: int = original(self, input_len)
    ids = self.full_untruncated_fill_ids
    if len(ids) != input_len:
        # A policy that sorts waiting requests by their prefixes asks before this is filled.
        ids = self.origin_input_ids + self.output_ids
    return min(most, _store().cap(input_len, ids, self.extra_key, _private(self)))


def sink_bind(result: list[int] | None, self: Any, reqs: Sequence[Any]) -> None:
    """After ``ReqToTokenPool.alloc``: the requests of a prefill batch have rows, some of them since earlier chunks."""
    if result is not None:
        _store().bind([prefill(req) for req in reqs])


def sink_unpin(self: Any, req: Any) -> None:
    """Before ``ReqToTokenPool.free``: a request lets go of its row."""
    if req.req_pool_idx is not None:
        _store().release(req.req_pool_idx)


def sink_clear(result: None, self: Any) -> None:
    """After ``ReqToTokenPool.clear``: the cache was flushed, e.g. because the weights are others now."""
    _store().clear()


def prefill(req: Any) -> Prefill:
    """Read what the store needs to know of a request of a prefill batch, which has its row and its extend set."""
    # Releases before 0.5.15 keep the end of the chunk in `fill_len`.
    end = req.extend_range.end if hasattr(req, "extend_range") else req.fill_len
    return Prefill(
        row=req.req_pool_idx,
        name=req.rid,
        ids=req.full_untruncated_fill_ids,
        prefix=len(req.prefix_indices),
        end=end,
        extra_key=req.extra_key,
        private=_private(req),
    )


def _private(req: Any) -> bool:
    return req.input_embeds is not None or req.positional_embed_overrides is not None


def _store() -> SinkStore:
    if not _STORES:
        raise MismatchError("a request is scheduled, but the process has no pool of 2-bit pages", where="pool")
    return _STORES[0]
