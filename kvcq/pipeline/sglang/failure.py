"""Why a server ended before it was ready, as an error with its exit code."""

from __future__ import annotations

from kvcq.errors import InputError, KvcqError, MismatchError, ResourceError
from kvcq.pipeline.sglang.child import Child
from kvcq.runtime.sglang.versions import INSTEAD

MEMORY = ("out of memory", "not enough memory")
USAGE = 2
BACKEND = "'kvcq'"


def early_end(child: Child, code: int) -> KvcqError:
    """Return the error of a server that is gone.

    Bad flags are the user's (exit 2), memory is exit 6; whatever else keeps the server from being ready is taken for a
    server that does not serve this bundle (exit 5), the plugin's own refusals among it.

    Args:
        child: The server.
        code: Its exit code.
    """
    reason = child.reason()
    what = f"SGLang ended with exit code {code} before it was ready" + (f": {reason}" if reason else "")
    if any(child.said(text) for text in MEMORY):
        return ResourceError(what, where="sglang", fix="lower --max-running, or --mem-fraction-static after --")
    if code == USAGE and reason is not None:
        if BACKEND in reason:
            # Its own parser knows the backend's name only from the plugin.
            return MismatchError(
                f"SGLang did not load the plugin: {reason}",
                where="sglang",
                fix="see what SGLANG_PLUGINS allows, or serve with --engine hf",
            )
        if "argument" in reason:
            return InputError(what, where="--", fix="see python -m sglang.launch_server --help")
    return MismatchError(what, where="sglang", fix=f"see its lines above, {INSTEAD}")
