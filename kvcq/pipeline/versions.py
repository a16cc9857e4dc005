"""Versions of kvcq and the libraries that its numbers depend on."""

from __future__ import annotations

import platform
from importlib import metadata

from kvcq.version import __version__

LIBRARIES = ("torch", "transformers", "numpy", "safetensors")


def installed(name: str) -> str | None:
    """Return the installed version of a distribution without importing it, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Return the versions that are recorded in artifacts: kvcq, Python and the numeric libraries."""
    found = {"kvcq": __version__, "python": platform.python_version()}
    return found | {name: version for name in LIBRARIES if (version := installed(name))}
