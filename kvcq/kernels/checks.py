"""Assumptions of kernels, checked before every launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from kvcq.errors import UnsupportedError


def check_platform(device: torch.device) -> None:
    """Refuse devices on which no kernel runs.

    Raises:
        UnsupportedError: HIP, or no GPU outside of Triton's interpreter.
        ValueError: another device than the current one.
    """
    if torch.version.hip is not None:
        raise UnsupportedError(f"kernels are not tested on HIP {torch.version.hip}", fix="use an NVIDIA GPU")
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise UnsupportedError(f"kernels run on CUDA, these tensors are on {device}", fix="use the torch path there")
    # Triton launches on the current device, wherever its arguments are.
    if device.index is not None and device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ValueError(f"tensors on {device}, but the current device is cuda:{torch.cuda.current_device()}")


def check_positive(name: str, number: float | None) -> None:
    """Refuse a number that is not positive; None passes.

    Raises:
        ValueError: names it.
    """
    if number is not None and not number > 0:
        raise ValueError(f"a {name} of {number} is not positive")


def check_offset(mu: Tensor | None, offset: Tensor | None, softcap: float | None, sinks: Tensor | None) -> None:
    """Refuse logits that lack the mean of the keys: a softcap and learned sinks need ``q . mu`` back.

    Args:
        mu: What keys are centred by, None: nothing.
        offset: ``q . mu``, None: zeros.
        softcap: Of logits.
        sinks: Learned sink logits.

    Raises:
        ValueError: it is missing.
    """
    if mu is not None and offset is None and (softcap is not None or sinks is not None):
        what = "learned sinks" if softcap is None else f"a softcap of {softcap:g}"
        raise ValueError(f"{what} over keys that are centred by {list(mu.shape)} means: offset is None, not q . mu")


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    contiguous: bool = True,
) -> None:
    """Check one argument of a launcher.

    Args:
        name: How the message calls it.
        tensor: The argument.
        shape: Wanted sizes; None is any.
        dtype: Wanted dtype; None is any.
        device: Where the other arguments are.
        contiguous: Whether the whole must be contiguous; otherwise the last dimension must.

    Raises:
        ValueError: what differs, with the numbers.
    """
    if tensor.ndim != len(shape) or any(
        want not in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
    ):
        wanted = [("any" if size is None else size) for size in shape]
        raise ValueError(f"{name} has shape {list(tensor.shape)}, not {wanted}")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}, not {dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, not {device}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} with strides {list(tensor.stride())} is not contiguous")
    if tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} with strides {list(tensor.stride())}: its last dimension is not contiguous")


def padded(d: int) -> int:
    """Return the columns of a tile of head dim d: four planes of bytes, each a power of two."""
    return 4 * power_of_two(d // 4)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n, 1 for n < 1."""
    return 1 << max(n - 1, 0).bit_length()
