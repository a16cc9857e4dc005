"""The ticket: what a quantized layer hands to a model in place of keys and values.

It has the shape, dtype and device that the model expects and no data. Only kvcq's attention function can do anything
with it; whatever else touches it ends in an error, and the numbers behind it are NaN should anything get past that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcq.errors import UnsupportedError

if TYPE_CHECKING:
    from kvcq.runtime.hf.layer import QuantizedLayer

# What looks at a tensor without reading it.
DESCRIPTIONS = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda")),
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_meta", "is_leaf", "grad_fn")),
        *(getattr(Tensor, name) for name in ("size", "dim", "numel", "stride", "element_size", "is_floating_point")),
    }
)


class Ticket(Tensor):
    """Stands for all keys or values of a layer, ``[B, H, slots, d]``.

    Attributes:
        layer: The layer that issued it.
    """

    layer: QuantizedLayer

    @classmethod
    def issue(cls, layer: QuantizedLayer, rows: Tensor, slots: int) -> Ticket:
        """Return a ticket like `rows` ``[B, H, t, d]`` for `slots` tokens; it occupies one number."""
        ticket = rows.new_full((1,), torch.nan).expand(*rows.shape[:2], slots, rows.shape[3]).as_subclass(cls)
        ticket.layer = layer
        return ticket

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let a ticket be described and moved nowhere; refuse everything else.

        Raises:
            UnsupportedError: something computes with the ticket; names the layer and the function.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if func in DESCRIPTIONS:
                return func(*args, **kwargs or {})
            # Shared layers ask for the device of their queries: the same one, or the copy is refused.
            if func is Tensor.to and (same := func(*args, **kwargs or {})) is args[0]:
                return same
        if func is Tensor.contiguous:
            return args[0]
        named = [*args, *(kwargs or {}).values()]
        flat = [part for arg in named for part in (arg if isinstance(arg, tuple | list) else (arg,))]
        issuer = next(part.layer.geometry.layer for part in flat if isinstance(part, cls))
        raise UnsupportedError(
            f"the model reads the keys and values of a quantized cache by itself ({getattr(func, '__name__', func)})",
            where=f"layer {issuer}",
            fix="use the cache with the model that it was loaded for, while it is open, and load it after the last "
            "call of set_attn_implementation",
        )
