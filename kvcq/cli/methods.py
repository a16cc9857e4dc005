"""kvcq methods."""

from __future__ import annotations

from kvcq.cli.console import Console
from kvcq.cli.options import Debug, Json


def command(json: Json = False, debug: Debug = False) -> None:
    """List the methods of kvcq fit with their parameters.

    Example: kvcq methods
    """
    from kvcq.pipeline.about import methods

    result = methods()
    Console(json=json).result(result.text(), result.payload())
