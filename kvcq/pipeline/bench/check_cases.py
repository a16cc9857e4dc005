"""What is checked beyond the shapes that are timed: ragged batches, every head dim, group and kind of scale. No torch.

Every set of constants costs a compilation, so what is decoded one by one (INT2 and vector codes with one scale, every
head dim, one and four query heads a KV head) has few requests, and the rest is paired, not multiplied out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Backend = Literal["cuda", "triton"]

BACKENDS: tuple[Backend, ...] = ("cuda", "triton")
TRITON: tuple[Backend, ...] = ("triton",)

HEAD_DIMS = (64, 80, 96, 128, 256)
CUDA_HEAD_DIMS, CUDA_GROUP = (64, 128), 8

# Around pages of 64 tokens and windows of 64 + 256, a padding row, and the longest contexts.
LENGTHS = (1, 2, 63, 64, 65, 0, 319, 320, 321, 1000, 4097, 32768, 100000)
# Of cases that are about one kernel.
FEW_LENGTHS = (1, 0, 65, 321, 4097)
# Enough tokens in all that the CUDA kernels give every warp tokens of its own, as they do not for single ones.
WRITTEN = (1, 63, 64, 65, 321, 1000, 4097)
FEW_WRITTEN = (1, 65, 321)
# Tokens before a chunk, and of it.
FEW_CHUNKS = ((0, 5), (321, 257), (1000, 64))
CHUNKS = ((20000, 1), (0, 5), (1000, 64), (321, 257), (4097, 1000))


@dataclass(frozen=True)
class DecodeCase:
    """Decode of one ragged batch.

    Attributes:
        codec: Of `layers.CODECS`.
        d: Head dim.
        group: Query heads of a KV head.
        lengths: Tokens of each request; 0 is a padding row.
        softcap: Of logits.
        learned: Learned sinks.
        window: Sliding window.
        backends: Kernels that it is for; one that cannot run here says why.
    """

    codec: str
    d: int
    group: int
    lengths: tuple[int, ...] = LENGTHS
    softcap: float | None = None
    learned: bool = False
    window: int | None = None
    backends: tuple[Backend, ...] = BACKENDS

    @property
    def label(self) -> str:
        """The case in words."""
        more = [f"softcap {self.softcap:g}"] if self.softcap is not None else []
        more += ["learned sinks"] if self.learned else []
        more += [f"window {self.window}"] if self.window is not None else []
        lengths = f"lengths {min(self.lengths)} to {max(self.lengths)}"
        return ", ".join([f"decode {self.codec}, d {self.d}, group {self.group}", lengths, *more])


@dataclass(frozen=True)
class WriteCase:
    """Tokens of ragged requests written at once, and one by one.

    Attributes:
        codec: Of `layers.CODECS`.
        d: Head dim.
        lengths: Tokens of each request.
        backends: Kernels that it is for; one that cannot run here says why.
    """

    codec: str
    d: int
    lengths: tuple[int, ...] = WRITTEN
    backends: tuple[Backend, ...] = BACKENDS

    @property
    def label(self) -> str:
        """The case in words."""
        return f"write {self.codec}, d {self.d}, one by one as in bulk, {sum(self.lengths)} tokens"


@dataclass(frozen=True)
class ExtendCase:
    """Ragged chunks over ragged prefixes.

    Attributes:
        codec: Of `layers.CODECS`.
        d: Head dim.
        group: Query heads of a KV head.
        chunks: Tokens before the chunk of each request, and of it.
    """

    codec: str
    d: int
    group: int
    chunks: tuple[tuple[int, int], ...] = CHUNKS

    @property
    def label(self) -> str:
        """The case in words."""
        counts, firsts = ([chunk[i] for chunk in self.chunks] for i in (1, 0))
        return (
            f"extend {self.codec}, d {self.d}, group {self.group}, chunks of {min(counts)} to {max(counts)} on "
            f"{min(firsts)} to {max(firsts)}"
        )


Case = DecodeCase | WriteCase | ExtendCase


def served(codec: str, d: int, group: int = 1) -> tuple[Backend, ...]:
    """Return the kernels that have a shape where everything is installed: CUDA those of one scale and few sizes."""
    cuda = d in CUDA_HEAD_DIMS and group <= CUDA_GROUP and codec in ("int2", "vq")
    return BACKENDS if cuda else TRITON


def _decode(codec: str, d: int, group: int, lengths: tuple[int, ...] = LENGTHS, **more: Any) -> DecodeCase:
    return DecodeCase(codec, d, group, lengths, backends=served(codec, d, group), **more)


def _write(codec: str, d: int, backend: Backend, lengths: tuple[int, ...] = FEW_WRITTEN) -> WriteCase:
    return WriteCase(codec, d, lengths, (backend,))


# Long contexts, softcaps, learned sinks, windows, four scales.
LONG = (
    _decode("int2", 64, 8),
    _decode("vqx4", 64, 8),
    _decode("int2x4", 80, 5),
    _decode("vq", 80, 5, learned=True),
    _decode("int2", 96, 1, window=700),
    _decode("vqx4", 96, 1),
    _decode("int2", 128, 4),
    _decode("int2x4", 128, 4),
    _decode("vq", 128, 4),
    _decode("vq", 128, 4, learned=True, window=700),
    _decode("vq", 128, 4, softcap=20.0, learned=True),
    _decode("int2x4", 256, 4),
    _decode("vq", 256, 4),
    DecodeCase("int2", 128, 5, backends=("cuda",)),
)
_LONG = {(case.codec, case.d, case.group) for case in LONG}
_WIDEST = sorted(HEAD_DIMS, reverse=True)
# Every head dim: one scale with one and four query heads a KV head, four scales with either.
_SHORT = [(codec, d, group) for d in _WIDEST for codec in ("vq", "int2") for group in (4, 1)]
_SHORT += [
    (codec, d, 4)
    for d in _WIDEST
    for codec in ("vqx4", "int2x4")
    if (codec, d) not in {(case.codec, case.d) for case in LONG}
]
DECODES = LONG + tuple(_decode(*shape, FEW_LENGTHS) for shape in _SHORT if shape not in _LONG)
SLOW_WRITES = (
    _write("vqx4", 256, "triton"),
    _write("vq", 128, "triton", WRITTEN),
    _write("vq", 80, "triton"),
    _write("int2", 128, "triton", WRITTEN),
    _write("int2", 256, "triton"),
    _write("int2x4", 80, "triton"),
    _write("int4", 128, "triton"),
)
WRITES = SLOW_WRITES + tuple(_write(codec, d, "cuda", WRITTEN) for d in (128, 64) for codec in ("vq", "int2"))
EXTENDS = (
    *(ExtendCase(codec, 256, group, FEW_CHUNKS) for codec in ("vq", "int2") for group in (4, 1)),
    ExtendCase("int2", 128, 4),
    ExtendCase("vq", 128, 4),
    *(ExtendCase(codec, d, group, FEW_CHUNKS) for d in (80, 64) for codec in ("vq", "int2") for group in (4, 1)),
)
# Those whose compilation takes longest begin first.
CASES: tuple[Case, ...] = (*SLOW_WRITES, *EXTENDS, *DECODES, *WRITES[len(SLOW_WRITES) :])
