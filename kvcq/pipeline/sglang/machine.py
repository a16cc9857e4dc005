"""What this machine has, asked without loading SGLang and without taking memory of a GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from importlib import metadata

from kvcq.errors import MismatchError, UnavailableError
from kvcq.kernels.select import LOWEST_CAPABILITY
from kvcq.runtime.sglang.versions import INSTEAD, require

GROUP, NAME = "sglang.srt.plugins", "kvcq"
DRIVER = "libcuda.so.1"
# Of CUdevice_attribute.
_MAJOR, _MINOR = 75, 76


@dataclass(frozen=True)
class Gpu:
    """A CUDA device: its name, bytes of memory, and compute capability."""

    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """What decides whether SGLang can serve here: its release, and the devices that it will see."""

    sglang: str
    gpus: tuple[Gpu, ...]


def this_machine() -> Machine:
    """Return what this machine has.

    Raises:
        UnavailableError: no SGLang, no GPU, or kvcq is not installed as a plugin.
        MismatchError: a release of SGLang outside the window.
    """
    version = require()
    if not any(entry.name == NAME for entry in metadata.entry_points(group=GROUP)):
        raise UnavailableError(
            "SGLang would not find kvcq: no installed package offers its plugin",
            where="--engine sglang",
            fix=f"install kvcq with pip, not only on PYTHONPATH, {INSTEAD}",
        )
    return Machine(version, cuda_devices())


def check_gpus(machine: Machine, wanted: int) -> None:
    """Refuse a machine whose devices cannot run the kernels.

    Raises:
        UnavailableError: fewer than `wanted` of them.
        MismatchError: one of the first `wanted` is too old.
    """
    found = len(machine.gpus)
    if found < wanted:
        have = "none" if not found else f"only {found}"
        raise UnavailableError(
            f"SGLang needs {wanted} CUDA GPU{'s' if wanted > 1 else ''}, {have} found",
            where="--engine sglang",
            fix="use --engine hf" if not found else f"lower --tp-size, {INSTEAD}",
        )
    for gpu in machine.gpus[:wanted]:
        if gpu.capability < LOWEST_CAPABILITY:
            have, least = (".".join(map(str, pair)) for pair in (gpu.capability, LOWEST_CAPABILITY))
            raise MismatchError(
                f"{gpu.name} has compute capability {have}, the kernels need {least}",
                where="--engine sglang",
                fix="use --engine hf",
            )


def cuda_devices() -> tuple[Gpu, ...]:
    """Return the CUDA devices of this process, asked of the driver: torch would keep a context as long as it runs."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(gpu for index in range(count.value) if (gpu := _device(driver, index)) is not None)


def _device(driver: ctypes.CDLL, index: int) -> Gpu | None:
    handle, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    major, minor = ctypes.c_int(), ctypes.c_int()
    failed = (
        driver.cuDeviceGet(ctypes.byref(handle), index)
        or driver.cuDeviceGetName(name, len(name), handle)
        or driver.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, handle)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, handle)
    )
    if failed:
        return None
    return Gpu(name.value.decode(errors="replace"), memory.value, (major.value, minor.value))
