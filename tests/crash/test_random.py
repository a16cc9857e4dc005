"""SIGKILL at random moments: 30 of each verb, one after the other on the same output until it is complete."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.crash.test_points import References, judge
from tests.crash.verbs import Bench, moments, sealed

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs fork")
KILLS = 30


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["collect", "fit", "validate", "pack"])
def test_random_kills_never_leave_what_the_next_step_accepts(bench: Bench, references: References, verb: str) -> None:
    out = bench.out(verb)
    words = bench.words(verb, out) + ["--resume"] * (verb == "collect")
    started = time.monotonic()
    assert bench.run(words).code == 0
    delay = moments(7, time.monotonic() - started)
    kills = completed = 0
    bench.clear()
    while kills < KILLS:
        ended = bench.run(words, kill_after=delay())
        kills += ended.code == -signal.SIGKILL
        judge(bench, verb, [references[verb]])
        if out.exists():
            completed += 1
            bench.clear()
    assert bench.run(words).code == 0
    assert sealed(out) == references[verb] and list(bench.folder.iterdir()) == [out]
