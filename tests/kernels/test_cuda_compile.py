"""The CUDA source compiles for sm_90 in every variant that `select` can choose, in its registers and without spills."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvcq.errors import UnavailableError
from kvcq.kernels.cuda import compile as build
from kvcq.kernels.cuda.compile import (
    CUDA_MAX_GROUP,
    DEFAULT_SHARED,
    HEAD_DIMS,
    SOURCES,
    RowsVariant,
    Shape,
    Variant,
    source,
    unserved,
)
from kvcq.kernels.select import launch_shape

REGISTERS = 65536
WARP = 32


def nvrtc() -> Path | None:
    """The library of the wheel nvidia-cuda-nvrtc."""
    found = find_spec("nvidia")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    return next((path for folder in folders for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*"))), None)


LIBRARY = nvrtc()
needs_nvrtc = pytest.mark.skipif(LIBRARY is None, reason="needs the wheel nvidia-cuda-nvrtc")


def variants() -> Iterator[Variant]:
    for head_dim in HEAD_DIMS:
        for group in range(1, CUDA_MAX_GROUP + 1):
            for vq in (False, True):
                for softcap in (False, True):
                    yield Variant(head_dim, group, vq, softcap, launch_shape(head_dim, group, softcap))


def name_of(variant: Variant) -> str:
    kind = "vq" if variant.vq else "int2"
    return f"{kind}-d{variant.head_dim}-group{variant.group}{'-cap' if variant.softcap else ''}"


def compiled(text: str, variant: Variant | RowsVariant) -> tuple[int, str]:
    """Compile for sm_90 and return the status and what the compiler and the assembler say."""
    library = ctypes.CDLL(str(LIBRARY))
    options = ["--gpu-architecture=sm_90", "--std=c++17", "--ptxas-options=-v"]
    options += [f"--define-macro={name}={value}" for name, value in variant.macros.items()]
    flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"decode.cu", 0, None, None)
    try:
        status = library.nvrtcCompileProgram(program, len(options), flags)
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    return status, log.value.decode()


def chosen(variant: Variant) -> bool:
    """Groups on either side of what changes the code: columns that hold both digits, two issues of each product."""
    return variant.group in (4, 7)


@needs_nvrtc
@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=() if chosen(v) else pytest.mark.exhaustive) for v in variants()],
    ids=name_of,
)
def test_every_variant_fits_its_registers_without_spills(variant: Variant) -> None:
    status, log = compiled(source(), variant)
    assert status == 0, log
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert registers, log
    assert spills and spills.groups() == ("0", "0"), log
    # Registers are given to warps in units of eight a thread.
    rounded = -(-int(registers[1]) // 8) * 8
    assert rounded * WARP * variant.shape.warps * variant.shape.blocks <= REGISTERS


@needs_nvrtc
def test_an_error_in_the_source_is_reported() -> None:
    variant = Variant(64, 1, False, False, Shape(4, 4))
    status, log = compiled(source() + "\nnonsense;\n", variant)
    assert status != 0
    assert "nonsense" in log


def test_the_source_needs_no_other_file() -> None:
    assert source().count('extern "C" __global__') == 1
    assert "#include" not in source()
    assert all((Path(build.__file__).parent / name).is_file() for name in SOURCES)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_shared_memory_holds_the_codebook_and_the_outputs(head_dim: int) -> None:
    plain = Variant(head_dim, 8, False, False, Shape(4, 4))
    assert plain.shared_bytes == 4 * (64 + 8 * (head_dim + 8) * 4)
    words = Variant(head_dim, 1, True, False, Shape(4, 4))
    assert words.shared_bytes == head_dim // 4 * 1024 + 1024
    assert max(plain.shared_bytes, words.shared_bytes) <= DEFAULT_SHARED


def test_what_is_not_served_is_named() -> None:
    assert unserved(128, 128, 4, 1) is None
    assert "head dims 128 and 64" in str(unserved(128, 64, 4, 1))
    assert "head dims 96 and 96" in str(unserved(96, 96, 4, 1))
    assert "9 query heads" in str(unserved(64, 64, 9, 1))
    assert "4 scales" in str(unserved(64, 64, 8, 4))


def test_without_cuda_core_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "missing", lambda: "cuda.core is not installed")
    build.core.cache_clear()
    with pytest.raises(UnavailableError, match=r"pip install 'kvcq\[cuda\]'"):
        build.core()
    build.core.cache_clear()


def test_a_cuda_core_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("no libcuda")

    monkeypatch.setattr(build, "missing", lambda: None)
    monkeypatch.setattr(build, "import_module", broken)
    build.core.cache_clear()
    with pytest.raises(UnavailableError, match="does not load: no libcuda"):
        build.core()
    build.core.cache_clear()


def test_no_kernel_of_a_captured_graph_is_ever_unloaded() -> None:
    assert build.kernel.cache_info().maxsize is None
