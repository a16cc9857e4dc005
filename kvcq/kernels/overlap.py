"""Launches that come onto the device before the launch in front of them has ended: programmatic dependent launch.

`start_next` lets the next launch come, `await_last` waits for the end of the one before and sees all that it wrote.
Every kernel waits before it ends, so whoever waits for the last one has waited for all. Decode waits before it lets
the merge come; the kernels of the merge do it the other way round and read constants of their layer meanwhile, which
are then at least as old as what ran in front of decode. Without `launch_pdl` both calls do nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

CAPABILITY = (9, 0)


def overlap_of(device: torch.device) -> dict[str, Any]:
    """Return the constant and the option of a launch that overlaps where the device can do it.

    Args:
        device: Where the tensors are.
    """
    if device.type != "cuda" or triton.knobs.runtime.interpret or torch.cuda.get_device_capability(device) < CAPABILITY:
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@triton.jit
def start_next(OVERLAP: tl.constexpr):
    """Let the next launch begin; it waits for the end of this one before it writes, or reads what launches write."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_last(OVERLAP: tl.constexpr):
    """Wait for the end of the launch before. Only constants of the layer may be read above, nothing written."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
