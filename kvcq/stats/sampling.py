"""Which tokens' rows are kept: the k smallest hashes over all tokens, so that merging is a union."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from kvcq.errors import InputError

Hashes = npt.NDArray[np.uint64]
Index = npt.NDArray[np.int64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def row_hashes(seed: int, digest: str, n: int) -> Hashes:
    """Return one uniform 64-bit hash per token 0..n-1 of a sequence: BLAKE2b(seed, digest), then splitmix64."""
    raw = hashlib.blake2b(seed.to_bytes(8, "little") + digest.encode("ascii"), digest_size=8).digest()
    key = np.uint64(int.from_bytes(raw, "little"))
    z = key + (np.arange(n, dtype=np.uint64) + np.uint64(1)) * _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    return z ^ (z >> np.uint64(31))


def canonical_order(hashes: Hashes, digests: list[str], sequence: Index, index: Index) -> Index:
    """Return the order by (hash, sequence digest, token index) in which sampled rows are stored."""
    rank = np.argsort(np.argsort(np.array(digests, dtype=str), kind="stable"), kind="stable")
    return np.lexsort((index, rank[sequence] if len(digests) else sequence, hashes))


class RowSelection:
    """The tokens to keep, known before the first forward: offer every sequence, then ask per sequence.

    All layers and heads share the rows. Queries are kept for the first `query_rows` of them.

    Args:
        rows: Keys and values to keep.
        query_rows: Queries to keep, at most `rows` (a larger number is lowered to it).
        seed: Seed of the hash.
    """

    def __init__(self, rows: int, query_rows: int, seed: int = 0) -> None:
        if rows < 0 or query_rows < 0:
            raise InputError("the number of sampled rows is negative", where="--rows")
        self.rows = rows
        self.query_rows = min(query_rows, rows)
        self.seed = seed
        self._digests: list[str] = []
        self._hashes: Hashes = np.empty(0, np.uint64)
        self._sequence: Index = np.empty(0, np.int64)
        self._index: Index = np.empty(0, np.int64)

    def offer(self, digest: str, n: int) -> None:
        """Let tokens 0..n-1 of a sequence compete.

        Raises:
            InputError: the sequence was offered before.
        """
        if digest in self._digests:
            raise InputError("a sequence is offered twice", where=digest[:12])
        self._digests.append(digest)
        hashes = np.concatenate([self._hashes, row_hashes(self.seed, digest, n)])
        sequence = np.concatenate([self._sequence, np.full(n, len(self._digests) - 1, np.int64)])
        index = np.concatenate([self._index, np.arange(n, dtype=np.int64)])
        if len(hashes) > 2 * self.rows:
            # Everything at or below the k-th hash survives, so that a tie is decided by the full key.
            limit = np.partition(hashes, self.rows - 1)[self.rows - 1] if self.rows else np.uint64(0)
            near = hashes <= limit
            hashes, sequence, index = hashes[near], sequence[near], index[near]
        order = canonical_order(hashes, self._digests, sequence, index)[: self.rows]
        self._hashes, self._sequence, self._index = hashes[order], sequence[order], index[order]

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def hashes(self) -> Hashes:
        """Hashes of the kept rows in canonical order (ascending)."""
        return self._hashes

    def rows_of(self, digest: str) -> tuple[Index, Index]:
        """Return (token index, place in the canonical order) of a sequence's kept rows, by ascending token."""
        mine = np.flatnonzero(self._sequence == self._digests.index(digest))
        mine = mine[np.argsort(self._index[mine], kind="stable")]
        return self._index[mine], mine.astype(np.int64)

    def positions(self, digest: str) -> Index:
        """Return the token indices of a sequence whose k and v rows are kept, ascending."""
        return self.rows_of(digest)[0]

    def query_positions(self, digest: str) -> Index:
        """Return the token indices of a sequence whose q rows are kept, ascending."""
        index, place = self.rows_of(digest)
        return index[place < self.query_rows]
