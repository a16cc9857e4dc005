"""The cache of one request in one layer: coded pages with exact rows beside them, or the simulation of that.

Rows come and go in the codec's shifted frame. Every token is coded when it arrives, the exact ones included: nothing
ever changes tier, and a token's codes depend on nothing but its own row.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcq.codecs.attend import Tier
from kvcq.codecs.encoded import Encoded, affine_words
from kvcq.codecs.packing import PAGE_TOKENS, block_bytes, page_views, read_tokens, write_tokens
from kvcq.codecs.pair import HeadCodec
from kvcq.errors import UnsupportedError
from kvcq.runtime.hf.reading import Reading, TierReading
from kvcq.runtime.hf.turn import Turn
from kvcq.runtime.layout import RING_SLACK
from kvcq.spec.plan import Windows

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    """Heads and dims of a layer, where its rows lie and in which dtype exact ones are kept."""

    kv_heads: int
    d_k: int
    d_v: int
    device: torch.device
    dtype: torch.dtype

    def rows(self, tokens: int) -> Pair:
        """Return zeroed key and value rows ``[H, tokens, d]``."""
        return (
            torch.zeros(self.kv_heads, tokens, self.d_k, dtype=self.dtype, device=self.device),
            torch.zeros(self.kv_heads, tokens, self.d_v, dtype=self.dtype, device=self.device),
        )


class RequestRows(ABC):
    """Rows of one request in one layer.

    Attributes:
        length: Tokens stored.
        held: Oldest position behind the sinks whose exact row is still there.
    """

    def __init__(self, codec: HeadCodec, windows: Windows, shape: Shape) -> None:
        self.codec, self.windows, self.shape = codec, windows, shape
        self.length = 0
        self.held = 0
        self._clamped = torch.zeros((), dtype=torch.int64, device=shape.device)

    @property
    def clamped(self) -> int:
        """How many values beyond the float16 range the codec clamped."""
        return int(self._clamped)

    def __deepcopy__(self, memo: dict[int, Any]) -> RequestRows:
        """Copy what is stored, for another cache."""
        return self.clone()

    def take(self, keys: Tensor, values: Tensor, turn: Turn, *, causal: bool) -> Reading:
        """Store the rows of new tokens and return what their queries read.

        Args:
            keys: Post-RoPE keys ``[H, t, d_k]`` as the model gives them.
            values: Values ``[H, t, d_v]``.
            turn: Positions of the tokens; exact rows from ``turn.low`` on are still held.
            causal: Every query sees all tokens up to its own.
        """
        recent = self.extend(self.codec.key_frame(keys), self.codec.value_frame(values), turn.low)
        tiers, sink = [Tier("recent", turn.low, *recent)], self.windows.sink
        if sink:
            tiers.append(Tier("sink", 0, *self.exact(0, min(sink, turn.stop))))
        if sink < min(turn.high, turn.stop):
            tiers.append(Tier("coded", sink, *self.decoded(sink, min(turn.high, turn.stop))))
        return TierReading(self.codec, tiers, turn)

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor) -> None:
        """Store frame rows ``[H, t, d]`` of the next t tokens."""

    def extend(self, keys: Tensor, values: Tensor, oldest: int) -> Pair:
        """Append rows as `append` does and return the exact rows from position `oldest` on, the new ones included."""
        first = self.length
        if self.lost(first + keys.shape[1]) <= oldest:
            self.append(keys, values)
            return self.exact(oldest, self.length)
        # They do not all fit: copy what the new ones will overwrite.
        before, new = self.exact(min(oldest, first), first), max(oldest - first, 0)
        k, v = (
            torch.cat([old, rows[:, new:].to(old.dtype)], 1) for old, rows in zip(before, (keys, values), strict=True)
        )
        self.append(keys, values)
        return k, v

    @abstractmethod
    def lost(self, length: int) -> int:
        """Return before which position exact rows behind the sinks are overwritten once `length` tokens are stored."""

    @abstractmethod
    def exact(self, start: int, stop: int) -> Pair:
        """Return the exact frame rows of the tokens at [start, stop), all of them sinks or none before `held`."""

    @abstractmethod
    def decoded(self, start: int, stop: int) -> Pair:
        """Return the decoded frame rows of the tokens at [start, stop), float32."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return every tensor that this request occupies."""

    def ahead_bytes(self) -> int:
        """Return the bytes that are held beside `tensors` for tokens to come: none."""
        return 0

    def check_crop(self, length: int) -> None:
        """Refuse a crop to `length` tokens that later queries would suffer from.

        Raises:
            UnsupportedError: exact rows that the shorter context needs have been overwritten; states how many tokens
                can be taken back.
        """
        # The next query is at position `length` and reads exactly from here on; sinks have rows of their own.
        needed = max(self.windows.sink, length - self.windows.recent + 1)
        if self.held > needed < length < self.length:
            most = self.length - (self.held + self.windows.recent - 1)
            raise UnsupportedError(
                f"cannot take back {self.length - length} of {self.length} tokens: exact rows of the last "
                f"{self.windows.recent + RING_SLACK} tokens are kept, enough to take back {most}",
                where="cache.crop",
                fix="draft fewer tokens at a time, or start with a new cache",
            )

    def crop(self, length: int) -> None:
        """Forget the tokens from position `length` on, once `check_crop` has passed."""
        if length < self.length:
            self.length = length
            self.held = min(self.held, length)

    def clone(self) -> RequestRows:
        """Return an independent copy."""
        twin = copy.copy(self)
        twin._own()
        return twin

    @abstractmethod
    def _own(self) -> None:
        """Replace every tensor by a copy."""


class PackedRows(RequestRows):
    """True memory: page blocks of the served layout, S sink rows and a ring of W + 64 recent rows."""

    def __init__(self, codec: HeadCodec, windows: Windows, shape: Shape) -> None:
        super().__init__(codec, windows, shape)
        self.groups = max(codec.k.spec.groups, codec.v.spec.groups)
        self.pages = torch.zeros(
            0,
            shape.kv_heads,
            block_bytes(shape.d_k, shape.d_v, self.groups),
            dtype=torch.uint8,
            device=shape.device,
        )
        self.sinks = shape.rows(windows.sink)
        self.ring = shape.rows(windows.recent + RING_SLACK)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Code the rows into pages; copy those of sinks and the last W + 64 into the exact tiers."""
        first, stop = self.length, self.length + keys.shape[1]
        k, v = self.codec.encode_keys(keys), self.codec.encode_values(values)
        self._clamped = self._clamped + k.clamped + v.clamped
        self._grow(stop)
        write_tokens(self._views(), first, (k.codes, v.codes, affine_words(k, v)))
        ring = self.ring[0].shape[1]
        newest = max(first, stop - ring)
        sinks = min(self.windows.sink, stop)
        for rows, sink, recent in zip((keys, values), self.sinks, self.ring, strict=True):
            taken = newest - first
            for span in spans(newest, stop, ring):
                recent[:, span] = rows[:, taken : taken + span.stop - span.start]
                taken += span.stop - span.start
            if first < sinks:
                sink[:, first:sinks] = rows[:, : sinks - first]
        self.length = stop
        self.held = max(self.held, self.lost(stop))

    def lost(self, length: int) -> int:
        """Return the tokens that the ring cannot hold."""
        return length - self.ring[0].shape[1]

    def exact(self, start: int, stop: int) -> Pair:
        """Read sink rows, or rows of the ring."""
        if stop <= self.windows.sink:
            return self.sinks[0][:, start:stop], self.sinks[1][:, start:stop]
        parts = spans(start, stop, self.ring[0].shape[1])
        keys, values = ([rows[:, span] for span in parts] for rows in self.ring)
        return (keys[0], values[0]) if len(parts) == 1 else (torch.cat(keys, 1), torch.cat(values, 1))

    def decoded(self, start: int, stop: int) -> Pair:
        """Unpack and decode pages."""
        k_codes, v_codes, words = read_tokens(self._views(), start, stop)
        none = torch.zeros((), dtype=torch.int64)
        k_groups, v_groups = self.codec.k.spec.groups, self.codec.v.spec.groups
        k = Encoded(k_codes, words[..., :k_groups, 0], words[..., :k_groups, 1], none)
        v = Encoded(v_codes, words[..., :v_groups, 2], words[..., :v_groups, 3], none)
        return self.codec.decode_keys(k), self.codec.decode_values(v)

    def tensors(self) -> list[Tensor]:
        """Return pages, sinks and ring."""
        return [self.pages, *self.sinks, *self.ring]

    def crop(self, length: int) -> None:
        """Forget tokens and give back whole pages; what they leave in the last page is zeroed."""
        super().crop(length)
        pages = -(-self.length // PAGE_TOKENS)
        if pages < self.pages.shape[0]:
            self.pages = self.pages[:pages].clone()
        if self.length < pages * PAGE_TOKENS:
            for view in self._views():
                view[-1, :, self.length % PAGE_TOKENS :] = 0

    def _grow(self, tokens: int) -> None:
        """Make `pages` reach `tokens` tokens; new ones are zero."""
        missing = -(-tokens // PAGE_TOKENS) - self.pages.shape[0]
        if missing > 0:
            self.pages = torch.cat([self.pages, self.pages.new_zeros(missing, *self.pages.shape[1:])])

    def _views(self) -> tuple[Tensor, Tensor, Tensor]:
        return page_views(self.pages, self.shape.d_k, self.shape.d_v, self.groups)

    def _own(self) -> None:
        self.pages = self.pages.clone()
        self.sinks = (self.sinks[0].clone(), self.sinks[1].clone())
        self.ring = (self.ring[0].clone(), self.ring[1].clone())


class SimulatedRows(RequestRows):
    """Fake quantization: exact rows of all tokens and, beside them, what their codes decode to. Saves no memory."""

    def __init__(self, codec: HeadCodec, windows: Windows, shape: Shape) -> None:
        super().__init__(codec, windows, shape)
        self.rows = shape.rows(0)
        self.hats = (self.rows[0].float(), self.rows[1].float())

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Keep the rows and code them, with those of the run of tokens that they continue; sinks are never coded."""
        stop = self.length + keys.shape[1]
        if stop > self.rows[0].shape[1]:
            self._reserve(max(stop, self.rows[0].shape[1] * 3 // 2))
        for kept, rows in zip(self.rows, (keys, values), strict=True):
            kept[:, self.length : stop] = rows.to(kept.dtype)
        for side, rows, hats in zip((self.codec.k, self.codec.v), self.rows, self.hats, strict=True):
            start = max(side.block(self.length)[0], self.windows.sink)
            if start < stop:
                positions = torch.arange(start, stop, device=rows.device)
                hats[:, start:stop] = side.hat(rows[:, start:stop].to(keys.dtype), positions)
        self.length = stop

    def lost(self, length: int) -> int:
        """Return 0: every row is kept."""
        return 0

    def exact(self, start: int, stop: int) -> Pair:
        """Read the rows as they came."""
        return self.rows[0][:, start:stop], self.rows[1][:, start:stop]

    def decoded(self, start: int, stop: int) -> Pair:
        """Read what the codes decode to."""
        return self.hats[0][:, start:stop], self.hats[1][:, start:stop]

    def tensors(self) -> list[Tensor]:
        """Return rows and decoded rows, spare capacity included."""
        return [*self.rows, *self.hats]

    def _reserve(self, capacity: int) -> None:
        def grown(old: Tensor) -> Tensor:
            new = old.new_zeros(old.shape[0], capacity, old.shape[2])
            new[:, : self.length] = old[:, : self.length]
            return new

        self.rows = (grown(self.rows[0]), grown(self.rows[1]))
        self.hats = (grown(self.hats[0]), grown(self.hats[1]))

    def _own(self) -> None:
        self.rows = (self.rows[0].clone(), self.rows[1].clone())
        self.hats = (self.hats[0].clone(), self.hats[1].clone())


def spans(start: int, stop: int, ring: int) -> list[slice]:
    """Return where positions [start, stop), at most `ring` of them, lie in a ring: one run, or two around its end."""
    first = start % ring
    last = first + stop - start
    return [slice(first, last)] if last <= ring else [slice(first, ring), slice(0, last - ring)]
