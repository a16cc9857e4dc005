"""From the library's slots to the tokens of each request: which slots are padding, and what a query may see.

The library counts slots, the same for all requests of a batch; kvcq stores what a request would have alone. All layers
of a model see the same slots, so a forward is read once, whatever the number of layers.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcq.errors import UnsupportedError
from kvcq.models.attention import AttentionCall


@dataclass(frozen=True)
class Slots:
    """The slots of a batch once a forward has come.

    Attributes:
        real: Which slots hold a token, bool ``[B, slots]`` on the CPU.
        fresh: For each request which of the t new slots hold one, int64 ``[n]`` on the model's device; None: all.
        visible: For each request which of its tokens its queries may see, bool ``[n, N]`` on the model's device; None:
            all up to their own.
    """

    real: Tensor
    fresh: tuple[Tensor | None, ...]
    visible: tuple[Tensor | None, ...]


class SlotReader:
    """Reads attention masks; the layers of one cache share it, and all but the first get what the first has read."""

    def __init__(self) -> None:
        self._mask: weakref.ref[Tensor] | None = None
        self._given: tuple[int, int] | None = None
        self._before = torch.zeros(0, 0, dtype=torch.bool)
        self._slots: Slots | None = None

    def read(self, call: AttentionCall, before: Tensor) -> Slots:
        """Return the slots after a forward.

        Args:
            call: An attention call of the forward.
            before: Which slots held a token before it, bool ``[B, slots]`` on the CPU.

        Raises:
            UnsupportedError: the mask shows a slot that was padding when it came: its token was not kept.
        """
        count = call.query.shape[2]
        given = (count, _version(call.mask))
        same_mask = call.mask is None if self._mask is None else call.mask is self._mask()
        if self._slots is not None and same_mask and given == self._given and torch.equal(before, self._before):
            return self._slots
        slots = _read(call, before, count)
        self._mask = None if call.mask is None else weakref.ref(call.mask)
        self._given, self._before, self._slots = given, before, slots
        return slots


def _version(mask: Tensor | None) -> int:
    # Inference tensors are not counted; between two forwards `before` differs in any case.
    return -1 if mask is None or mask.is_inference() else mask._version


def _read(call: AttentionCall, before: Tensor, count: int) -> Slots:
    batch = before.shape[0]
    if call.mask is None:
        if not bool(before.all()):
            raise _revived()
        everything = torch.ones(batch, count, dtype=torch.bool)
        return Slots(torch.cat([before, everything], 1), (None,) * batch, (None,) * batch)
    visible = call.visible()[:, 0].expand(batch, -1, -1)
    device = visible.device
    old = before.to(device)
    # What no query sees is padding.
    new = visible[:, :, -count:].any(1)
    real = torch.cat([old, new], 1)
    causal = torch.ones(count, real.shape[1], dtype=torch.bool, device=device).tril(before.shape[1])
    shown = visible & new[:, :, None]
    plain = (shown == (causal & real[:, None] & new[:, :, None])).flatten(1).all(1)
    revived = (shown[:, :, : before.shape[1]] & ~old[:, None]).flatten(1).any(1)
    # One copy to the host: what follows is decided there.
    told = torch.cat([torch.stack([plain, revived, new.all(1)], 1), new], 1).cpu()
    if bool(told[:, 1].any()):
        raise _revived()
    fresh = tuple(None if told[b, 2] else new[b].nonzero()[:, 0] for b in range(batch))
    seen = tuple(None if told[b, 0] else visible[b][new[b]][:, real[b]] for b in range(batch))
    return Slots(torch.cat([before, told[:, 3:]], 1), fresh, seen)


def _revived() -> UnsupportedError:
    return UnsupportedError(
        "the attention mask shows tokens that were padding when they came, and were not kept",
        where="attention_mask",
        fix="pass the mask of the tokens before, continued by the new ones",
    )
