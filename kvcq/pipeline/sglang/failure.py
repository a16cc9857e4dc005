"""Why a server ended before it was ready, as an error with its exit code."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvcq.errors import (
    CorruptArtifactError,
    InputError,
    KvcqError,
    MismatchError,
    ResourceError,
    UnavailableError,
    UnsupportedError,
)
from kvcq.pipeline.sglang.child import OWN, Child
from kvcq.runtime.sglang.versions import INSTEAD

MEMORY = ("out of memory", "not enough memory", "GiB of exact rows")
KINDS: tuple[type[KvcqError], ...] = (
    InputError,
    CorruptArtifactError,
    MismatchError,
    ResourceError,
    UnavailableError,
)
# Codes of a process that its parser, or kvcq's plugin in it, has ended.
BY_CODE = {kind.exit_code: kind for kind in KINDS}
BY_NAME = {kind.__name__: kind for kind in (*KINDS, UnsupportedError)}
BACKEND = "invalid choice: 'kvcq'"
NOT_LOADED = "kvcq is not loaded: "
# The last line of a traceback whose exception is the plugin's.
RAISED = re.compile(r"kvcq\.errors\.(\w+): (.+)")
# How the launcher of every release tells of a scheduler that ended, with the exit code that the plugin gave it.
SCHEDULER = re.compile(r"scheduler died during initialization \(exit code: (\d+)\)")


def early_end(child: Child, code: int) -> KvcqError:
    """Return the error of a server that is gone.

    What the plugin said in one of its processes is the whole error, with the exit code that it ended that process with.
    A parser says why with the launcher's code, and memory is exit 6. Whatever else keeps the server from being ready is
    taken for one that does not serve this bundle, exit 5.

    Args:
        child: The server.
        code: Its exit code.
    """
    reason, lines = child.reason(), child.lines()
    memory = any(child.said(text) for text in MEMORY)
    if (told := _plugin(lines)) is not None:
        line, kind = told
        # The line has its own place and remedy.
        return (kind or BY_CODE.get(_scheduler(lines, code)) or (ResourceError if memory else MismatchError))(line)
    what = f"SGLang ended with exit code {code} before it was ready" + (f": {reason}" if reason else "")
    if reason is not None and BACKEND in reason:
        # Its parser knows the backend's name only from the plugin.
        return MismatchError(
            f"SGLang did not load the plugin: {child.after(NOT_LOADED) or reason}",
            where="sglang",
            fix=f"see what SGLANG_PLUGINS allows, {INSTEAD}",
        )
    if memory:
        return ResourceError(what, where="sglang", fix="lower --max-running, or --mem-fraction-static after --")
    return BY_CODE.get(code, MismatchError)(what, where="sglang", fix=f"see its lines above, {INSTEAD}")


def _plugin(lines: Sequence[str]) -> tuple[str, type[KvcqError] | None] | None:
    """Return the last error that the plugin stated, and its kind where the line names it; None without one."""
    for line in reversed(lines):
        if line.startswith(OWN):
            return line.removeprefix(OWN).strip(), None
        if (raised := RAISED.fullmatch(line.strip())) and raised[1] in BY_NAME:
            return raised[2], BY_NAME[raised[1]]
    return None


def _scheduler(lines: Sequence[str], code: int) -> int:
    """Return the exit code of the last scheduler that ended by itself, else that of the launcher."""
    codes = [int(found[1]) for line in lines if (found := SCHEDULER.search(line))]
    return codes[-1] if codes else code
