"""What a device offers to kernels, as `select` asks for it."""

from __future__ import annotations

import torch

from kvcq.kernels.select import SHARED_BYTES, Limits


def device_limits(device: torch.device) -> Limits:
    """Return what a device offers; a CPU, where only Triton's interpreter runs kernels, counts as a small one."""
    if device.type != "cuda":
        return Limits((8, 0), multiprocessors=2, shared_bytes=0)
    found = torch.cuda.get_device_properties(device)
    shared = getattr(found, "shared_memory_per_block_optin", SHARED_BYTES)
    return Limits((found.major, found.minor), found.multi_processor_count, shared, torch.version.hip)
