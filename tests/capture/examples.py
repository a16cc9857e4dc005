"""Tiny models and sequences shared by the tests of capture."""

import hashlib

import numpy as np

from kvcq.capture.collect import Capture
from kvcq.data.sequences import TokenSequence
from kvcq.models.load import wrap_model
from kvcq.stats.probe import ProbePlan, choose_probe
from kvcq.stats.sampling import RowSelection
from tests.tiny import tiny_model, tiny_tokens


def loaded(model_type="llama", **overrides):
    return wrap_model(tiny_model(model_type, **overrides))


def sequence(number, length, segments=None):
    tokens = tiny_tokens(length, seed=number).numpy().astype(np.int32)
    digest = hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest()
    return TokenSequence(tokens=tokens, segments=segments or ((0, length),), digest=digest)


def everything(sequences):
    """Return a plan without probe."""
    return ProbePlan({}, {one.digest: len(one.tokens) for one in sequences})


def collect(source, geometry, sequences, *, plan=None, chunk=1000, rows=40, query_rows=10, only=None):
    """Return (capture, plan) after running the sequences, or those whose index is in `only`."""
    plan = plan or choose_probe([(one.digest, one.segments) for one in sequences])
    selection = RowSelection(rows, query_rows, seed=0)
    for one in sequences:
        if plan.counted[one.digest]:
            selection.offer(one.digest, plan.counted[one.digest])
    capture = Capture(source, geometry, selection, plan)
    for i, one in enumerate(sequences):
        if only is None or i in only:
            capture.run(one, chunk)
    return capture, plan
