"""Texts that every Python installation carries: calibration without a download.

They depend on the Python version; the digest of the token ids in the artifact tells two runs apart.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from kvcq.errors import UnavailableError


def pydoc_topics() -> Iterator[str]:
    """Yield the language reference topics of ``pydoc`` as English prose, in order of their names.

    Raises:
        UnavailableError: this Python was installed without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        fix = "install the full standard library, or name a text file"
        raise UnavailableError("this Python has no pydoc topics", where="builtin:pydoc-topics", fix=fix) from None
    for name in sorted(topics):
        yield topics[name]


def stdlib_source() -> Iterator[str]:
    """Yield the source text of the public top-level modules of the standard library, in order of their names.

    Raises:
        UnavailableError: this Python was installed without sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    # The interpreter's own list keeps installed packages, tests and stray files out.
    names = sorted(name for name in sys.stdlib_module_names if not name.startswith("_"))
    files = [path for path in (folder / f"{name}.py" for name in names) if path.is_file()]
    if not files:
        fix = "install the full standard library, or name a text file"
        raise UnavailableError("this Python has no library sources", where="builtin:stdlib", fix=fix)
    for path in files:
        yield path.read_text(encoding="utf-8")


BUILTIN: dict[str, Callable[[], Iterator[str]]] = {
    "builtin:pydoc-topics": pydoc_topics,
    "builtin:stdlib": stdlib_source,
}
