"""Property tests draw the same examples everywhere and have no deadline: machines differ in speed."""

import functools
import os
import signal
from pathlib import Path

# Workers that share cores would wait for each other's threads; processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import httpcore2
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("kvcq", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("kvcq")
# A shell has what it starts in the background ignore Ctrl-C, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# What a process has written outlives it: a flush to the disk itself is for machines that lose power. Tests of its order
# note the calls, and fresh processes make them.
os.fsync = lambda descriptor: None
# Every client would read the certificates of this machine anew, which takes longer than most answers to it.
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)

if not torch.cuda.is_available():
    # Without a GPU kernels run in Triton's interpreter, which is asked for when Triton is imported: whichever test
    # comes first.
    os.environ["TRITON_INTERPRET"] = "1"

    from tests.interpreter import prepare_once

    prepare_once()

TESTS = Path(__file__).parent
# Rooms that test the packages whose coverage is reported. A trace doubles the time of Triton's interpreter, so tests of
# other rooms run without one.
TRACED = ("artifacts", "codecs", "evaluation", "golden", "methods", "server", "spec", "stats", "transforms")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    traced = [TESTS / room for room in TRACED]
    for item in items:
        if not any(item.path.is_relative_to(folder) for folder in traced):
            item.add_marker(pytest.mark.no_cover)
