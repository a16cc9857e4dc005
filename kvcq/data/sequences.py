"""Documents to token sequences: the unit of collection, sharding and merging."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from kvcq.data.documents import Document
from kvcq.data.template import Policy, iter_tokens, resolve_policy, starts_with_two_bos
from kvcq.errors import InputError
from kvcq.spec.header import DataSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Packing = Literal["on", "isolate", "off"]
MIN_TOKENS = 16


@dataclass(frozen=True)
class TokenSequence:
    """One sequence for one (chunked) forward.

    Attributes:
        tokens: int32 [T], read-only.
        segments: Half-open ranges that attend only to themselves, positions from 0; one range unless isolated.
        digest: SHA-256 in hexadecimal of the little-endian int32 ids.
    """

    tokens: NDArray[np.int32]
    segments: tuple[tuple[int, int], ...]
    digest: str


@dataclass
class Corpus:
    """The sequences of a run, the record of their source, and warnings for the artifact's header."""

    sequences: list[TokenSequence]
    source: DataSource
    warnings: list[str] = field(default_factory=list)


def build_corpus(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    labels: Sequence[str],
    seq_len: int,
    num_tokens: int | None = None,
    packing: Packing = "on",
    template: Policy = "auto",
    chat_template: str | None = None,
) -> Corpus:
    """Tokenize documents and cut them into sequences of at most `seq_len` tokens.

    ``on`` joins documents as they come, nothing between them, and they attend to each other; ``isolate`` cuts the
    same sequences and keeps the borders of the texts as segments; ``off`` never joins: a longer text is split, a
    shorter one stays alone. A sequence shorter than 16 tokens is dropped, so the last one before `num_tokens` is
    lengthened to 16. A repeated sequence is counted once. Reading stops as soon as `num_tokens` are reached.

    Args:
        documents: Texts and conversations, consumed lazily.
        tokenizer: The model's tokenizer.
        labels: Names of the sources for the record (`describe_sources`).
        seq_len: Longest sequence in tokens.
        num_tokens: Tokens wanted in all; None reads everything.
        packing: How documents share sequences.
        template: Template policy of `encode`.
        chat_template: Jinja2 text that replaces the tokenizer's template.

    Raises:
        InputError: a bad `seq_len` or `num_tokens`, text that yields no sequence, or no chat template.
    """
    for flag, value in (("--seq-len", seq_len), ("--num-tokens", num_tokens)):
        if value is not None and value < MIN_TOKENS:
            raise InputError(f"{value} tokens are too few", where=flag, fix=f"use at least {MIN_TOKENS}")
    reader = _Reader(tokenizer, template, chat_template)
    texts = (reader.read(document) for document in documents)
    cuts = _split(texts, seq_len) if packing == "off" else _pack(texts, seq_len, isolate=packing == "isolate")
    sequences: dict[str, TokenSequence] = {}
    got = repeated = dropped = 0
    for ids, segments in cuts:
        if num_tokens is not None and got + len(ids) > num_tokens:
            ids, segments = _shorten(ids, segments, max(num_tokens - got, MIN_TOKENS))
        if len(ids) < MIN_TOKENS:
            dropped += 1
            continue
        sequence = _sequence(ids, segments)
        if sequence.digest in sequences:
            repeated += 1
            continue
        sequences[sequence.digest] = sequence
        got += len(ids)
        if num_tokens is not None and got >= num_tokens:
            break
    if not sequences:
        fix = "give more text"
        raise InputError(f"no sequence of at least {MIN_TOKENS} tokens", where=", ".join(labels), fix=fix)
    warnings = reader.warnings()
    if repeated:
        warnings.append(f"{repeated} repeated sequence{'s' * (repeated > 1)} counted once")
    if dropped:
        warnings.append(f"{dropped} sequence{'s' * (dropped > 1)} shorter than {MIN_TOKENS} tokens dropped")
    if num_tokens is not None and got < num_tokens:
        warnings.append(f"the text yields {got} of {num_tokens} tokens wanted ({got / num_tokens:.0%})")
    source = DataSource(
        sources=tuple(labels),
        sha256=hashlib.sha256("\n".join(sequences).encode()).hexdigest(),
        template=reader.resolved(),
        packing=packing,
        seq_len=seq_len,
        wanted_tokens=num_tokens,
        got_tokens=got,
    )
    return Corpus(list(sequences.values()), source, warnings)


class _Reader:
    """Tokenizes documents lazily and remembers what the header must say about them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, policy: Policy, chat_template: str | None) -> None:
        self.tokenizer, self.policy, self.chat_template = tokenizer, policy, chat_template
        self.used: set[str] = set()
        self.two_bos = False

    def read(self, document: Document) -> Iterator[list[int]]:
        self.used.add(resolve_policy(document, self.policy))
        start: list[int] = []
        for ids in iter_tokens(self.tokenizer, document, self.policy, self.chat_template):
            start = start if len(start) > 1 else start + ids[:2]
            self.two_bos = self.two_bos or starts_with_two_bos(self.tokenizer, start)
            yield ids

    def resolved(self) -> str:
        """Return the policy as it turned out, e.g. ``auto: chat``, with the digest of a template that was passed in."""
        name = "+".join(sorted(self.used))
        name = name if self.policy == name else f"{self.policy}: {name}"
        if self.chat_template and "chat" in self.used:
            name += f", template sha256 {hashlib.sha256(self.chat_template.encode()).hexdigest()}"
        return name

    def warnings(self) -> list[str]:
        return ["texts start with two BOS tokens: statistics of the first token are off"] if self.two_bos else []


Cut = tuple[list[int], tuple[tuple[int, int], ...]]


def _pack(texts: Iterable[Iterator[list[int]]], seq_len: int, *, isolate: bool) -> Iterator[Cut]:
    ids: list[int] = []
    starts = [0]

    def cut(stop: int) -> Cut:
        nonlocal ids, starts
        inside = sorted({start for start in starts if start < stop})
        segments = tuple(zip(inside, [*inside[1:], stop], strict=True)) if isolate else ((0, stop),)
        done, ids = ids[:stop], ids[stop:]
        # A text that runs over the border continues as a segment of its own, positions from 0.
        starts = [0, *(start - stop for start in starts if start > stop)]
        return done, segments

    for text in texts:
        starts.append(len(ids))
        for piece in text:
            ids += piece
            while len(ids) >= seq_len:
                yield cut(seq_len)
    if ids:
        yield cut(len(ids))


def _split(texts: Iterable[Iterator[list[int]]], seq_len: int) -> Iterator[Cut]:
    for text in texts:
        yield from _pack([text], seq_len, isolate=False)


def _shorten(ids: list[int], segments: tuple[tuple[int, int], ...], length: int) -> Cut:
    length = min(length, len(ids))
    return ids[:length], tuple((start, min(stop, length)) for start, stop in segments if start < length)


def _sequence(ids: list[int], segments: tuple[tuple[int, int], ...]) -> TokenSequence:
    tokens = np.asarray(ids, dtype=np.int32)
    tokens.setflags(write=False)
    return TokenSequence(tokens, segments, hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest())
