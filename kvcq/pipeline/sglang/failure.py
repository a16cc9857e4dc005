"""Why a server ended before it was ready, as an error with its exit code."""

from __future__ import annotations

from kvcq.errors import CorruptArtifactError, InputError, KvcqError, MismatchError, ResourceError, UnavailableError
from kvcq.pipeline.sglang.child import Child
from kvcq.runtime.sglang.versions import INSTEAD

MEMORY = ("out of memory", "not enough memory", "GiB of exact rows")
# Codes of a launcher that its parser, or kvcq's plugin in it, has ended.
BY_CODE: dict[int, type[KvcqError]] = {
    error.exit_code: error
    for error in (InputError, CorruptArtifactError, MismatchError, ResourceError, UnavailableError)
}
BACKEND = "invalid choice: 'kvcq'"
NOT_LOADED = "kvcq is not loaded: "


def early_end(child: Child, code: int) -> KvcqError:
    """Return the error of a server that is gone.

    A launcher that was ended by its parser or by the plugin says why with its own exit code, and memory is exit 6.
    Whatever else keeps the server from being ready is taken for one that does not serve this bundle, exit 5.

    Args:
        child: The server.
        code: Its exit code.
    """
    reason = child.reason()
    what = f"SGLang ended with exit code {code} before it was ready" + (f": {reason}" if reason else "")
    if reason is not None and BACKEND in reason:
        # Its parser knows the backend's name only from the plugin.
        return MismatchError(
            f"SGLang did not load the plugin: {child.after(NOT_LOADED) or reason}",
            where="sglang",
            fix=f"see what SGLANG_PLUGINS allows, {INSTEAD}",
        )
    if any(child.said(text) for text in MEMORY):
        return ResourceError(what, where="sglang", fix="lower --max-running, or --mem-fraction-static after --")
    return BY_CODE.get(code, MismatchError)(what, where="sglang", fix=f"see its lines above, {INSTEAD}")
