"""A count of the device is known a moment later, and never waited for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvcq.runtime.sglang.later import Later


def test_a_count_is_asked_for_at_most_once_in_a_while_and_read_when_it_is_there():
    now = [100.0]
    source = torch.tensor([7])
    later = Later(source, 1.0, lambda: now[0])
    assert later.poll() is None
    assert later.poll() == 7
    source += 1
    assert [later.poll() for _ in range(3)] == [None, None, None]
    now[0] += 1.0
    assert [later.poll() for _ in range(3)] == [None, 8, None]


def test_what_has_not_arrived_is_not_read():
    here = [False]
    later = Later(torch.tensor([7]))
    later._arrived = SimpleNamespace(query=lambda: here[0], record=lambda: None)
    assert [later.poll() for _ in range(3)] == [None, None, None]
    here[0] = True
    assert later.poll() == 7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_copy_from_a_device_is_the_count():
    source = torch.zeros(1, dtype=torch.int64, device="cuda")
    later = Later(source, 0.0)
    source += 41
    later.poll()
    torch.cuda.synchronize()
    assert later.poll() == 41
