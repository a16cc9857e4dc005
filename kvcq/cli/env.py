"""kvcq env."""

from __future__ import annotations

from kvcq.cli.console import Console
from kvcq.cli.options import Debug, Json


def command(json: Json = False, debug: Debug = False) -> None:
    """Print versions, devices and folders, ready to paste into a bug report.

    Example: kvcq env
    """
    from kvcq.pipeline.about import environment

    result = environment()
    Console(json=json).result(result.text(), result.payload())
