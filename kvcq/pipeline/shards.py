"""Shards of a collection: every N-th sequence of the whole list."""

from __future__ import annotations

from collections.abc import Sequence

from kvcq.data.sequences import TokenSequence
from kvcq.errors import InputError


def check_shard(shard: tuple[int, int] | None) -> None:
    """Refuse a shard number that does not exist.

    Raises:
        InputError: states the legal ones.
    """
    if shard is not None and not 0 <= shard[0] < shard[1]:
        count = max(shard[1], 1)
        raise InputError(
            f"no shard {shard[0]}/{shard[1]}",
            where="--shard",
            fix=f"write I/N with I from 0 to N-1: 0/{count} to {count - 1}/{count}",
        )


def sharded(sequences: Sequence[TokenSequence], shard: tuple[int, int] | None) -> Sequence[TokenSequence]:
    """Return the sequences of a shard: every N-th of the whole list.

    Raises:
        InputError: there are none.
    """
    mine = sequences if shard is None else sequences[shard[0] :: shard[1]]
    if shard is not None and not mine:
        raise InputError(
            f"shard {shard[0]}/{shard[1]} is empty: the text yields {len(sequences)} sequences",
            where="--shard",
            fix=f"use at most {len(sequences)} shards",
        )
    return mine
