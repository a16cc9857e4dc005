"""Which releases of SGLang the plugin knows, and which of its two ways of building a pool each one has.

Nothing here imports SGLang: ``kvcq serve`` asks before anything heavy is loaded.
"""

from __future__ import annotations

import re
from importlib import metadata
from typing import Literal

from kvcq.errors import MismatchError, UnavailableError, shown

Adapter = Literal["mixin", "configurator"]

FIRST, UNTIL = (0, 5, 13), (0, 5, 18)
CONFIGURATOR = (0, 5, 16)
WINDOW = ">=0.5.13,<0.5.18"
# The release that the plugin was run on, on one H200: loaded in launcher and scheduler, canary active, decode in CUDA
# graphs, chunked prefill, radix hits, retraction, metrics, an end by SIGTERM; sabotaged in four ways, it ended with
# exit code 5. The others of the window were read, and are held by the tests of their sources; no release was run with
# more than one rank.
TESTED = "0.5.15.post1"
INSTEAD = "or serve this bundle with --engine hf"

_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:\.post\d+)?(?:\+[0-9A-Za-z.]+)?")


def adapter(version: str) -> Adapter:
    """Return how this release of SGLang builds its pools.

    ``mixin``: ``ModelRunnerKVCacheMixin._init_pools`` looks the pool class up in its module (before 0.5.16);
    ``configurator``: ``KVCacheConfigurator._build_mha_kv_pool`` takes it as an argument.

    Raises:
        MismatchError: not a release inside the window; the line names the window and ``--engine hf``.
    """
    match = _RELEASE.fullmatch(version)
    release = tuple(int(part) for part in match.groups()) if match else None
    if release is None or not FIRST <= release < UNTIL:
        kind = "outside the supported releases" if release else "not a release that kvcq knows"
        raise MismatchError(
            f"SGLang {shown(version)} is {kind}, sglang{WINDOW}",
            where="sglang",
            fix=f"install 'sglang=={TESTED}', {INSTEAD}",
        )
    return "mixin" if release < CONFIGURATOR else "configurator"


def installed() -> str | None:
    """Return the version of the installed SGLang, without importing it; None where there is none."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def require() -> str:
    """Return the version of the installed SGLang.

    Raises:
        UnavailableError: SGLang is not installed.
        MismatchError: its release is outside the window.
    """
    version = installed()
    if version is None:
        raise UnavailableError(
            "SGLang is not installed",
            where="--engine sglang",
            fix=f"pip install 'kvcq[sglang]' (sglang{WINDOW}) on a machine with a CUDA GPU, {INSTEAD}",
        )
    adapter(version)
    return version
