"""Which layers a library attends in, and which requests of a batch it is given."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcq.runtime.sglang import begins
from kvcq.runtime.sglang.begins import find_begins, prepare_layers
from kvcq.runtime.sglang.session import extend_step
from kvcq.spec.plan import Windows
from tests.runtime.sglang.stage import Stage
from tests.runtime.sglang.stated import geometry

WINDOWS = Windows(sink=4, recent=16)
LEAST = 20
PARTS = st.tuples(st.sampled_from([0, 0, 5, 70]), st.integers(0, 60))


def step_of(stage, parts, padding=0):
    batch = stage.extend(parts, padding)
    return extend_step(batch, stage.req_to_token, stage.exact_from, WINDOWS)


@given(parts=st.lists(PARTS, min_size=1, max_size=5), padding=st.integers(0, 9))
def test_the_rest_of_a_batch_is_prepared_as_if_it_were_alone(parts, padding):
    stage, twin = (Stage({}, WINDOWS, rows=5, pages=30) for _ in range(2))
    steps = []
    for own in (stage, twin):
        requests = [own.admit(torch.randint(3, 99, (130,))) for _ in parts]
        own.extend([(request, first) for request, (first, _) in zip(requests, parts, strict=True)])
        steps.append(requests)
    counted = list(zip(steps[0], (count for _, count in parts), strict=True))
    step = step_of(stage, counted, padding)
    found = find_begins(step, [first for first, _ in parts], [count for _, count in parts], LEAST)
    alone = [not first and count >= LEAST for first, count in parts]
    if not any(alone):
        assert found is None
        return
    edges = step.starts.tolist()
    assert found.spans == tuple((edges[n], edges[n + 1]) for n, taken in enumerate(alone) if taken)
    others = [n for n, taken in enumerate(alone) if not taken]
    assert found.tokens.tolist() == [t for n in others for t in range(edges[n], edges[n + 1])]
    if not others:
        assert found.rest is None
        return
    # Pages are handed out in the order of the batch, so the twin, too, admits and extends all of them first.
    step_of(twin, list(zip(steps[1], (count for _, count in parts), strict=True)))
    for n in others:
        steps[1][n].stored -= parts[n][1]
    wanted = step_of(twin, [(steps[1][n], parts[n][1]) for n in others])
    for name in ("slots", "positions", "requests", "starts", "oldest"):
        assert torch.equal(getattr(found.rest, name), getattr(wanted, name)), name
    for member in fields(wanted.batch):
        assert torch.equal(getattr(found.rest.batch, member.name), getattr(wanted.batch, member.name)), member.name


def test_lengths_that_the_forward_does_not_hold_are_left_to_the_kernel():
    stage = Stage({}, WINDOWS)
    step = step_of(stage, [(stage.admit(torch.arange(90)), 30)])
    assert find_begins(step, [0], [31], LEAST) is None
    assert find_begins(step, [0], [30], LEAST).spans == ((0, 30),)


@pytest.mark.parametrize("change", [{"softcap": 30.0}, {"window": 128}, {"sinks": True}])
def test_layers_that_do_more_than_scale_have_no_library(monkeypatch, change):
    asked = []
    monkeypatch.setattr(begins, "prepare", lambda *own: asked.append(own) or True)
    k, v = (SimpleNamespace(d=d, map=torch.zeros(1, dtype=torch.bfloat16)) for d in (32, 16))
    tables = {number: SimpleNamespace(heads=4, k=k, v=v) for number in (0, 1)}
    device = torch.device("cpu")
    layers = geometry(layers=3).layers
    assert prepare_layers(layers, tables, 8, device, 8192) == {0, 1}
    # Alike layers are prepared once.
    assert asked == [((8, 4), (32, 16), torch.bfloat16, device, 8192)]
    assert prepare_layers(geometry(layers=2, **change).layers, tables, 8, device, 8192) == frozenset()
