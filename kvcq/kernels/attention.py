"""Attention of one decode step, by the kernel that the device has for a layer.

Work list (`plan`), partial results (`decode` in Triton or `cuda.decode`) and their merge (`merge`) behind one class::

    decoder = Decoder.reserve(tables, windows, q_heads, max_batch, max_context, device)
    decoder.plan(requests)                                        once a step, for all layers of the geometry
    decoder.decode(tables, cache, requests, q, out, scaling=...)  for each layer

Everything is allocated by `reserve`; the other calls neither allocate nor wait for the device and can be captured in
a CUDA graph, once a first call has compiled its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcq.errors import UnsupportedError
from kvcq.kernels.arrays import LayerCache, Requests, Tables
from kvcq.kernels.checks import check_offset, check_platform
from kvcq.kernels.cuda.decode import decode_partials_cuda
from kvcq.kernels.decode import decode_partials
from kvcq.kernels.limits import device_limits
from kvcq.kernels.merge import merge
from kvcq.kernels.plan import UNLIMITED, Partials, Plan
from kvcq.kernels.select import Backend, Choice, choose, launch_shape
from kvcq.spec.plan import Windows


@dataclass
class Decoder:
    """Workspace of the layers that share a geometry, windows and a batch.

    Attributes:
        choice: The kernel, its cut and the reason.
        work: The work list, see `plan`.
        partials: Partial results, overwritten by every layer.
        planned: Requests of the step that the work list is of, 0: of none yet.
    """

    choice: Choice
    work: Plan
    partials: Partials
    planned: int = 0

    @classmethod
    def reserve(
        cls,
        tables: Tables,
        windows: Windows,
        q_heads: int,
        max_batch: int,
        max_context: int,
        device: torch.device | str,
        *,
        backend: Backend | None = None,
        share: Partials | None = None,
    ) -> Decoder:
        """Choose the kernel and allocate all that decoding needs.

        Args:
            tables: A layer of the geometry.
            windows: S and W.
            q_heads: Query heads Hq.
            max_batch: Most requests of a step.
            max_context: Longest request, in tokens: the cut is for such lengths, all that positions can count work.
            device: Where the cache is.
            backend: Take this one; None: the best.
            share: Partial results of a decoder of as many heads and channels whose steps are never at the same time;
                taken where they have room.

        Raises:
            UnsupportedError: no kernel for this geometry or device, or not the wanted one, with the reason.
            ValueError: sizes out of range, with the numbers.
        """
        device = torch.device(device)
        check_platform(device)
        if not 1 <= max_context <= UNLIMITED:
            raise ValueError(f"a longest request of {max_context} tokens: plans count 1 to {UNLIMITED}")
        group, rest = divmod(q_heads, tables.heads)
        if rest or group < 1:
            raise UnsupportedError(f"{q_heads} query heads on {tables.heads} KV heads: groups are whole heads")
        limits = device_limits(device)
        dtype = str(tables.k.map.dtype).removeprefix("torch.")
        settings: dict[str, Any] = {"batch": max_batch, "context": max_context, "windows": windows}
        settings |= {"dtype": dtype, "limits": limits}
        choice = choose(limits.capability, tables, group, **settings)
        if backend not in (None, choice.backend):
            if backend != "triton":
                raise UnsupportedError(f"{backend} decode: {choice.reason}", fix=f"use {choice.backend}")
            choice = choose(limits.capability, tables, group, without="asked for", **settings)
        if choice.backend == "torch":
            raise UnsupportedError(f"no decode kernel: {choice.reason}")
        work = Plan.reserve(max_batch, parts=choice.parts, exact_rows=choice.exact_rows, windows=windows, device=device)
        shared = None if share is None else share.narrowed(work)
        return cls(choice, work, Partials.reserve(work, q_heads, tables.v.d) if shared is None else shared)

    def plan(self, requests: Requests, window: int | None = None) -> None:
        """Fill the work list of a step; see `Plan.update`.

        Args:
            requests: The batch; its lengths include the tokens of this step, and its page table is that of the layers.
            window: Sliding window of the layers that follow, None without one.
        """
        self.work.update(requests, self.work.windows, window)
        self.planned = requests.batch

    def decode(
        self,
        tables: Tables,
        cache: LayerCache,
        requests: Requests,
        q: Tensor,
        out: Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
        offset: Tensor | None = None,
        sinks: Tensor | None = None,
        rotate: bool = True,
    ) -> None:
        """Attend with the newest token of every request; what `reference.reference_decode` defines.

        Args:
            tables: Constants of the layer.
            cache: What is stored; its windows are those reserved.
            requests: The batch that `plan` was called with.
            q: Mapped queries ``[B, Hq, d_k]``, served dtype, contiguous.
            out: Written, ``[B, Hq, d_v]``, served dtype; zeros for a request of length 0.
            scaling: Factor on products.
            softcap: Logits become ``softcap tanh(logits / softcap)``.
            offset: ``q . mu`` float32 ``[B, Hq]``, read with a softcap or learned sinks; None for keys that are not
                centred, or without these.
            sinks: Learned sink logits float32 ``[Hq]``.
            rotate: False leaves outputs in the frame of values: the caller folded the rotation.

        Raises:
            UnsupportedError: a codec, geometry or platform without a kernel.
            ValueError: tensors that do not fit, with the numbers, an `offset` that is missing, or another number of
                requests than was planned.
        """
        if cache.windows != self.work.windows:
            raise ValueError(f"a cache with windows {cache.windows}: reserved for {self.work.windows}")
        if requests.batch != self.planned:
            raise ValueError(f"a step of {requests.batch} requests: the work list is of {self.planned}")
        check_offset(tables.k.offset, offset, softcap, sinks)
        run: Callable[..., None] = decode_partials
        if self.choice.backend == "cuda":
            shape = launch_shape(tables.k.d, q.shape[1] // tables.heads, softcap is not None)
            run = partial(decode_partials_cuda, shape=shape)
        arrays = (tables, cache, requests, q, self.work, self.partials)
        run(*arrays, scaling=scaling, softcap=softcap, offset=offset)
        merge(
            tables,
            self.work,
            self.partials,
            out,
            sinks=sinks,
            offset=offset,
            scaling=scaling,
            softcap=softcap,
            rotate=rotate,
        )
