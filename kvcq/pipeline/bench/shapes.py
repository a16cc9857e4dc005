"""What is measured: shapes, the bytes that each must move, and how many layers a timing rotates over. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvcq.errors import InputError, shown
from kvcq.reports.text import context_label
from kvcq.runtime.layout import PAGE
from kvcq.spec.plan import Windows

OPS = ("check", "decode", "write", "extend")
WINDOWS = Windows()
CODES_PER_BYTE, WORD_BYTES, BF16_BYTES = 4, 8, 2

ROTATED_BYTES = 512 << 20
MOST_LAYERS = 96
STEP_LAYERS = 36

_SHAPE = re.compile(
    r"(?P<batch>[1-9]\d{0,3})x(?P<context>[1-9]\d{0,6})(?P<unit>k?)(@(?P<d>\d{2,3})(:(?P<q>\d{1,3})/(?P<kv>\d{1,3}))?)?"
)


@dataclass(frozen=True)
class Shape:
    """One attention layer.

    Attributes:
        batch: Requests.
        context: Tokens of each, those of the step included.
        d: Head dim of keys and values.
        q_heads: Query heads.
        heads: KV heads.
        chunk: New tokens of the step: 1 in decode.
    """

    batch: int
    context: int
    d: int = 128
    q_heads: int = 32
    heads: int = 8
    chunk: int = 1

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.q_heads // self.heads

    @property
    def label(self) -> str:
        """The shape as it is written on the command line; a chunk shows as ``chunk+prefix``."""
        length = context_label(self.context)
        if self.chunk > 1:
            prefix = self.context - self.chunk
            length = context_label(self.chunk) + (f"+{context_label(prefix)}" if prefix else "")
        own = Shape(self.batch, self.context, self.d, *_heads(self.d), self.chunk)
        heads = "" if self == own else f":{self.q_heads}/{self.heads}"
        return f"{self.batch}x{length}" + (f"@{self.d}{heads}" if self.d != Shape.d or heads else "")

    @property
    def bf16_bytes(self) -> int:
        """Bytes of the keys and values of a BF16 cache."""
        return self.batch * self.context * self.heads * 2 * self.d * BF16_BYTES

    @property
    def pages(self) -> int:
        """Pages of all requests."""
        return self.batch * -(-self.context // PAGE)

    def token_bytes(self, words: int) -> int:
        """Bytes of a coded token of one KV head."""
        return 2 * self.d // CODES_PER_BYTE + words * WORD_BYTES

    def cache_bytes(self, words: int) -> int:
        """Bytes of all pages of a layer."""
        return self.pages * PAGE * self.heads * self.token_bytes(words)

    def read_bytes(self, words: int, windows: Windows = WINDOWS) -> int:
        """Bytes that a decode step must read: codes behind the windows, exact rows in them."""
        exact = min(self.context, windows.sink + windows.recent)
        row = 2 * self.d * BF16_BYTES
        return self.batch * self.heads * ((self.context - exact) * self.token_bytes(words) + exact * row)


DECODE = tuple(Shape(*pair) for pair in ((1, 8192), (1, 32768), (1, 102400), (8, 32768), (32, 8192), (32, 32768)))
DECODE += (Shape(128, 8192), Shape(32, 32768, 64, 64, 8))
APPEND = Shape(128, 8192)
PREFILL = Shape(1, 8192, chunk=8192)
EXTEND = tuple(Shape(1, 28672 + chunk, chunk=chunk) for chunk in (512, 4096, 8192))


def _heads(d: int) -> tuple[int, int]:
    return (64, 8) if d == 64 else (32, 8)


def parse_shape(text: str) -> Shape:
    """Read ``BATCHxCONTEXT[@D[:QHEADS/KVHEADS]]``: ``32x32k``, ``32x32k@64``, ``8x4k@96:24/8``.

    Heads are 32/8, and 64/8 at a head dim of 64.

    Raises:
        InputError: anything else, heads that do not divide, or a head dim that is no multiple of 16.
    """
    fix = "write BATCHxCONTEXT[@D[:Q/KV]], e.g. 32x32k or 32x32k@64:64/8"
    found = _SHAPE.fullmatch(text.strip())
    if found is None:
        raise InputError(f"{shown(text)} is not a shape", where="--shapes", fix=fix)
    d = int(found["d"] or Shape.d)
    q_heads, heads = (int(found["q"]), int(found["kv"])) if found["q"] else _heads(d)
    if not heads or q_heads % heads or not q_heads or d % 16 or not 16 <= d <= 256:
        raise InputError(
            f"{shown(text)}: query heads must be a multiple of the KV heads and the head dim one of 16 up to 256",
            where="--shapes",
            fix=fix,
        )
    return Shape(int(found["batch"]), int(found["context"]) * (1024 if found["unit"] else 1), d, q_heads, heads)


def parse_shapes(texts: Sequence[str]) -> tuple[Shape, ...]:
    """Read shapes of decode, in the order given and each once; none given: the default ones."""
    return tuple(dict.fromkeys(parse_shape(text) for text in texts)) or DECODE


def layers_for(count: int) -> int:
    """Return how many layers of `count` bytes a timing rotates over, so that none is left in a cache of the chip."""
    return min(max(-(-ROTATED_BYTES // max(count, 1)), 1), MOST_LAYERS)


def cases(ops: Sequence[str], shapes: Sequence[Shape]) -> list[tuple[str, Shape]]:
    """Return what is timed, in order: ``decode``, ``append``, ``prefill`` and ``extend`` with their shapes."""
    found = [("decode", shape) for shape in shapes] if "decode" in ops else []
    if "write" in ops:
        found += [("append", APPEND), ("prefill", PREFILL)]
    if "extend" in ops:
        found += [("extend", shape) for shape in EXTEND]
    return found
