"""methods and env: what this installation offers and where it runs."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from importlib.util import find_spec

from kvcq.methods import registry
from kvcq.pipeline.result import Answer, aligned
from kvcq.pipeline.versions import installed
from kvcq.version import __version__

SHOWN = (
    "torch",
    "transformers",
    "huggingface_hub",
    "safetensors",
    "numpy",
    "triton",
    "cuda-core",
    "datasets",
    "sglang",
)


def methods() -> Answer:
    """Describe every method that ``kvcq fit --method`` takes, third-party ones included."""
    lines: list[str] = []
    described = registry.describe()
    for info in described:
        origin = "" if info.origin == "kvcq" else f"  [{info.origin}]"
        lines.append(f"{info.name}{origin}")
        lines.append(f"  {info.problem or info.summary}")
        if info.problem is None:
            lines.append(f"  accuracy only: {info.unserved}" if info.unserved else "  served")
        if info.paper:
            lines.append(f"  {info.paper}")
        rows = [(f"{p.name}={p.default}", f"{p.doc} ({p.allowed})") for p in info.parameters]
        lines += aligned(rows, indent="    ")
        lines.append("")
    return Answer(tuple(lines[:-1]), {"methods": [dataclasses.asdict(info) for info in described]})


def environment() -> Answer:
    """Describe versions, processor, accelerators, the kernels that they get and the kvcq cache folder."""
    import platformdirs

    packages = {name: installed(name) for name in SHOWN}
    devices = _devices()
    kernels = _kernels()
    threads = os.cpu_count() or 1
    record = {
        "kvcq": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": threads,
        "packages": packages,
        "devices": devices,
        "cache": str(platformdirs.user_cache_path("kvcq")),
        "kernels": dict(kernels),
    }
    rows = [
        ("kvcq", __version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("platform", platform.platform()),
        ("cpus", str(threads)),
        *((name, version or "not installed") for name, version in packages.items()),
        ("devices", ", ".join(devices) or "CPU only"),
        *kernels,
        ("cache", str(record["cache"])),
    ]
    return Answer(tuple(aligned(rows)), record)


def _devices() -> list[str]:
    if find_spec("torch") is None:
        return []
    import torch

    return [
        f"cuda:{i} {torch.cuda.get_device_name(i)} (sm_{''.join(map(str, torch.cuda.get_device_capability(i)))})"
        for i in range(torch.cuda.device_count())
    ]


def _kernels() -> list[tuple[str, str]]:
    """Return what decodes INT2 and VQ caches on the first device, and why. Imports no compiler of kernels."""
    from kvcq.kernels.cuda.compile import missing
    from kvcq.kernels.select import Limits, describe

    limits = Limits(None)
    if find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            from kvcq.kernels.limits import device_limits

            limits = device_limits(torch.device("cuda", 0))
    return list(describe(limits, missing()))
