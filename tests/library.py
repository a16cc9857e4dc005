"""What tests must know about the version of transformers they run with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import transformers
from packaging import version

from kvcq.errors import UnsupportedError

# The version of constraints.txt; older ones are supported down to 5.12.
OLDER = version.parse(transformers.__version__) < version.parse("5.24")
OWN_PATH = "its own attention code path"


@contextmanager
def dispatched_by_name() -> Iterator[None]:
    """Skip a type whose attention the library dispatches by name only since a newer version: kvcq refuses it."""
    try:
        yield
    except UnsupportedError as refusal:
        if OLDER and OWN_PATH in str(refusal):
            pytest.skip(str(refusal))
        raise
