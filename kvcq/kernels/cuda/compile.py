"""From the CUDA source of the package to a kernel of one device, by way of NVRTC and `cuda.core`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, Literal

from kvcq.errors import UnavailableError

SOURCES = ("device.cuh", "decode.cu")
HEAD_DIMS = (64, 128)
CUDA_MAX_GROUP = 8
ROW_PADDING = 8
STATE_BYTES = 64
FLOAT_BYTES = 4
TABLE_BYTES = 1024

# Of rows.cuh: 8 channels of 32 rows, padded; of write_keys.cu: the tables of a group in stages.
TILE_BYTES = 528
GROUP_BYTES = 5120
STAGES = 3

# What a launch may take without asking the driver for more.
DEFAULT_SHARED = 48 * 1024


@dataclass(frozen=True)
class Shape:
    """How a kernel lies on a multiprocessor.

    Attributes:
        warps: Warps of a block.
        blocks: Blocks of a multiprocessor that registers are limited for.
    """

    warps: int
    blocks: int


@dataclass(frozen=True)
class Variant:
    """Constants of one compiled kernel.

    Attributes:
        head_dim: d of keys and values, 64 or 128.
        group: Query heads of a KV head, 1 to 8.
        vq: Keys are in vector codes.
        softcap: Logits are capped.
        shape: How it lies on a multiprocessor.
    """

    head_dim: int
    group: int
    vq: bool
    softcap: bool
    shape: Shape

    sources = SOURCES
    entry = "decode"

    @property
    def macros(self) -> dict[str, int]:
        """The constants as the source knows them."""
        return {
            "HEAD_DIM": self.head_dim,
            "GROUP": self.group,
            "VECTOR_KEYS": int(self.vq),
            "SOFTCAP": int(self.softcap),
            "WARPS": self.shape.warps,
            "BLOCKS": self.shape.blocks,
        }

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the codebook, at the end the outputs of all warps."""
        rows = self.shape.warps * (STATE_BYTES + self.group * (self.head_dim + ROW_PADDING) * FLOAT_BYTES)
        # Room to align the tables of the codebook, one a group of four channels, to their own size.
        return max(rows, (self.head_dim // 4 + 1) * TABLE_BYTES) if self.vq else rows


@dataclass(frozen=True)
class RowsVariant:
    """Constants of one compiled kernel that writes rows.

    Attributes:
        entry: ``write_keys``: keys in vector codes; ``write_uniform``: rows in 2-bit codes.
        head_dim: d, 64 or 128.
        team: Warps that share 32 tokens: 1, or all of a block.
        shape: How it lies on a multiprocessor.
    """

    entry: Literal["write_keys", "write_uniform"]
    head_dim: int
    team: int
    shape: Shape

    @property
    def sources(self) -> tuple[str, ...]:
        """Files of its source."""
        return "rows.cuh", "uniform.cuh", f"{self.entry}.cu"

    @property
    def macros(self) -> dict[str, int]:
        """The constants as the source knows them."""
        return {
            "HEAD_DIM": self.head_dim,
            "WARPS": self.shape.warps,
            "TEAM": self.team,
            "BLOCKS": self.shape.blocks,
        }

    @property
    def tokens(self) -> int:
        """Tokens of a block."""
        return self.shape.warps // self.team * 32

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: its rows, and tables where every warp reads the same."""
        rows = self.shape.warps // self.team * (self.head_dim // 8) * TILE_BYTES
        return rows + (STAGES * GROUP_BYTES if self.entry == "write_keys" and self.team == 1 else 0)


def unserved(d_k: int, d_v: int, group: int, words: int) -> str | None:
    """Say why the CUDA kernel does not serve a geometry, None when it does."""
    if d_k != d_v or d_k not in HEAD_DIMS:
        return f"head dims {d_k} and {d_v}: the CUDA kernel has {HEAD_DIMS[0]} or {HEAD_DIMS[1]} for both"
    if group > CUDA_MAX_GROUP:
        return f"{group} query heads a KV head: the CUDA kernel has 1 to {CUDA_MAX_GROUP}"
    if words != 1:
        return f"{words} scales a row: the CUDA kernel has 1"
    return None


def source(names: Sequence[str] = SOURCES) -> str:
    """Return CUDA C++ source: NVRTC reads one text and no files."""
    return "\n".join(files(__package__).joinpath(name).read_text(encoding="utf-8") for name in names)


def missing() -> str | None:
    """Say why kernels cannot be compiled here, None where they can. Imports neither torch nor `cuda.core`."""
    for name in ("cuda.core", "cuda.bindings"):
        try:
            found = find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"{name} is not installed"
    return None


@lru_cache(maxsize=1)
def core() -> Any:
    """Return the module `cuda.core`, or what it was before it left `experimental`.

    Raises:
        UnavailableError: it is not installed, or does not load.
    """
    reason = missing()
    if reason is not None:
        raise UnavailableError(reason, fix="pip install 'kvcq[cuda]'")
    try:
        found = import_module("cuda.core")
        return found if hasattr(found, "Program") else import_module("cuda.core.experimental")
    except ImportError as error:
        raise UnavailableError(f"cuda.core does not load: {error}", fix="repair it or uninstall it") from error


# Without a limit: what falls out of a cache is unloaded, and a captured graph may still launch it.
@cache
def kernel(variant: Variant | RowsVariant, capability: tuple[int, int], device: int) -> Any:
    """Compile a variant for a device, once, and let it take the shared memory that it needs.

    Args:
        variant: What to compile.
        capability: Compute capability of the device.
        device: CUDA ordinal; its context must be current.

    Raises:
        UnavailableError: `cuda.core` is not installed.
    """
    toolkit = core()
    options = toolkit.ProgramOptions(
        std="c++17",
        arch=f"sm_{capability[0]}{capability[1]}",
        define_macro=[(name, str(value)) for name, value in variant.macros.items()],
    )
    program = toolkit.Program(source(variant.sources), code_type="c++", options=options)
    compiled = program.compile("cubin").get_kernel(variant.entry)
    if variant.shared_bytes > DEFAULT_SHARED:
        driver = import_module("cuda.bindings.driver")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        handle = getattr(compiled, "handle", None) or compiled._handle
        (status,) = driver.cuKernelSetAttribute(attribute, variant.shared_bytes, handle, driver.CUdevice(device))
        if status != driver.CUresult.CUDA_SUCCESS:
            raise UnavailableError(f"{variant.shared_bytes} bytes of shared memory a block were refused: {status}")
    return compiled
