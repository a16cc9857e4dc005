"""What is checked beyond the shapes that are timed: ragged batches, every head dim, group and kind of scale. No torch.

Every set of constants costs a compilation, so sizes are paired, not multiplied out: each codec meets each head dim, one
and four scales take turns, and every head dim has one group of query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Backend = Literal["cuda", "triton"]

BACKENDS: tuple[Backend, ...] = ("cuda", "triton")

# Around pages of 64 tokens and windows of 64 + 256, a padding row, and the longest contexts.
LENGTHS = (1, 2, 63, 64, 65, 0, 319, 320, 321, 1000, 4097, 32768, 100000)
# Enough tokens in all that the CUDA kernels give every warp tokens of its own, as they do not for single ones.
WRITTEN = (1, 63, 64, 65, 321, 1000, 4097)
# Tokens before a chunk, and of it.
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
        backends: Kernels; one that does not serve the shape is left out.
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
        backends: Kernels; one that does not serve the shape is left out.
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

DECODES = (
    DecodeCase("int2", 64, 8),
    DecodeCase("vqx4", 64, 8),
    DecodeCase("int2x4", 80, 5),
    DecodeCase("vq", 80, 5, learned=True),
    DecodeCase("int2", 96, 1, window=700),
    DecodeCase("vqx4", 96, 1),
    DecodeCase("int2", 128, 4),
    DecodeCase("int2x4", 128, 4),
    DecodeCase("vq", 128, 4),
    DecodeCase("vq", 128, 4, learned=True, window=700),
    DecodeCase("vq", 128, 4, softcap=20.0, learned=True),
    DecodeCase("int2x4", 256, 4),
    DecodeCase("vq", 256, 4),
    DecodeCase("vq", 64, 1, backends=("cuda",)),
    DecodeCase("int2", 128, 5, backends=("cuda",)),
)
WRITES = (
    WriteCase("vq", 128, backends=("triton",)),
    WriteCase("int2", 128, backends=("triton",)),
    WriteCase("vq", 128, backends=("cuda",)),
    WriteCase("int2", 128, backends=("cuda",)),
    WriteCase("vq", 64, backends=("cuda",)),
    WriteCase("int2", 64, backends=("cuda",)),
)
EXTENDS = (ExtendCase("int2", 128, 4), ExtendCase("vq", 128, 4))
# Those whose compilation takes longest begin first.
CASES: tuple[Case, ...] = (*WRITES[:2], *EXTENDS, *DECODES, *WRITES[2:])
