"""Held-out passages for every choice that fit makes by attention error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

PROBE_SEQUENCES = 2
PROBE_TOKENS = 4096
MIN_SEQUENCES = 6
PROBE_QUERIES = 64

Span = tuple[int, int]


@dataclass(frozen=True)
class ProbePlan:
    """Which tokens form the probe and which are counted.

    Attributes:
        spans: Probe tokens ``[start, stop)`` by sequence digest, within one segment.
        counted: Tokens from the start of each sequence that enter moments and samples.
        split: True when the probe is the last eighth of each sequence rather than whole sequences.
    """

    spans: Mapping[str, Span] = field(default_factory=dict)
    counted: Mapping[str, int] = field(default_factory=dict)
    split: bool = False

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of the probe's sequences in their stored order."""
        return tuple(sorted(self.spans))


def choose_probe(sequences: Sequence[tuple[str, Sequence[Span]]]) -> ProbePlan:
    """Choose the probe from the whole source list, so that every shard comes to the same choice.

    With six sequences or more: the two of smallest digest, truncated to 4096 tokens, left out of everything else.
    With fewer: the last eighth of each sequence (at most 4096 tokens). A span stays within the segment that holds most
    of it, because tokens of different segments do not attend to each other.

    Args:
        sequences: (digest, segments) of every sequence; segments are ``[start, stop)`` and the last ends the sequence.
    """
    lengths = {digest: segments[-1][1] for digest, segments in sequences}
    if len(lengths) >= MIN_SEQUENCES:
        whole = set(sorted(lengths)[:PROBE_SEQUENCES])
        spans = {digest: _clip((0, lengths[digest]), segments) for digest, segments in sequences if digest in whole}
        counted = {digest: 0 if digest in whole else n for digest, n in lengths.items()}
        return ProbePlan({digest: (a, min(b, a + PROBE_TOKENS)) for digest, (a, b) in spans.items()}, counted)
    counted = {digest: n - min(n // 8, PROBE_TOKENS) for digest, n in lengths.items()}
    spans = {
        digest: _clip((counted[digest], lengths[digest]), segments)
        for digest, segments in sequences
        if counted[digest] < lengths[digest]
    }
    return ProbePlan(spans, counted, split=True)


def probe_queries(start: int, stop: int, count: int = PROBE_QUERIES) -> npt.NDArray[np.int64]:
    """Return up to `count` distinct token indices, evenly spaced in the last quarter of ``[start, stop)``."""
    length = stop - start
    first = start + length - max(length // 4, 1)
    return np.unique(np.linspace(first, stop - 1, count).round().astype(np.int64))


def _clip(span: Span, segments: Sequence[Span]) -> Span:
    overlaps = [(max(span[0], start), min(span[1], stop)) for start, stop in segments]
    return max(overlaps, key=lambda part: part[1] - part[0])
