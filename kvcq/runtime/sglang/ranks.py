"""Which KV heads a rank of tensor parallelism holds: the deal of SGLang's ``QKVParallelLinear``.

Up to as many ranks as heads, each holds an equal share of them; of more ranks, as many as each head has copies of hold
the same one, ``rank // (ranks / heads)``. Whatever else refuses or maps ranks asks here.
"""

from __future__ import annotations

from kvcq.errors import MismatchError

FLAG = "--tp-size"


def legal_ranks(q_heads: int, kv_heads: int) -> tuple[int, ...]:
    """Return how many ranks may share attention: each has whole query heads, and whole KV heads or a copy of one."""
    return tuple(n for n in range(1, q_heads + 1) if q_heads % n == 0 and _shares(kv_heads, n))


def local_heads(kv_heads: int, tp: int) -> int:
    """Return how many KV heads a rank holds.

    Raises:
        MismatchError: neither number divides the other; names the numbers that work.
    """
    if tp < 1 or not _shares(kv_heads, tp):
        legal = ", ".join(str(n) for n in range(1, kv_heads + 1) if kv_heads % n == 0)
        raise MismatchError(
            f"{kv_heads} KV heads cannot be shared by {tp} ranks",
            where=FLAG,
            fix=f"use {legal}, or a multiple of {kv_heads}",
        )
    return max(kv_heads // tp, 1)


def head_range(kv_heads: int, tp: int, rank: int) -> range:
    """Return the KV heads that a rank holds.

    Args:
        kv_heads: KV heads of the layer.
        tp: Ranks that share attention.
        rank: This one.

    Raises:
        MismatchError: neither number of heads and ranks divides the other, or there is no such rank.
    """
    if not 0 <= rank < tp:
        raise MismatchError(f"rank {rank} of {tp}", where=FLAG)
    share = local_heads(kv_heads, tp)
    first = rank * kv_heads // tp
    return range(first, first + share)


def _shares(kv_heads: int, tp: int) -> bool:
    return kv_heads % tp == 0 or tp % kv_heads == 0
