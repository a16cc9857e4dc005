"""The work list of a decode step: which program reads which part of which request.

Every request of length n has three ranges, for the query at position n - 1 with windows S, W and, where the model has
a sliding window, L::

    oldest  = max(n - W, exact_from, S)
    sinks   = [max(n - L, 0), min(S, n))             exact, in the sink rows
    coded   = [max(n - L, S), min(oldest, n))        2-bit, in pages
    recent  = [max(n - L, oldest), n)                exact, in the ring

Coded ranges are cut at pages of 64 tokens, into items of nearly equal length whose number over all requests is at most
`parts`; exact ranges are joined and cut into items of `exact_rows` rows. All of it is computed on the device, once a
step: lengths never visit the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcq.kernels.arrays import Requests
from kvcq.kernels.checks import check_platform, check_tensor, power_of_two
from kvcq.spec.plan import Windows

MAX_BATCH = 4096
SPAN_FIELDS = 8
ITEM_FIELDS = 4
LEAD_FIELDS = 4
UNLIMITED = 1 << 30

MIN_REQUESTS = 16
MIN_STEP, MAX_STEP = 8, 128

# Comparisons of an item with every request that one program makes at once, unless there are very many requests.
COMPARISONS = 1 << 12


def max_items(max_batch: int, parts: int, exact_rows: int, windows: Windows) -> int:
    """Return how many items a plan of `max_batch` requests can need, whatever their lengths."""
    exact = -(-(windows.sink + windows.recent) // exact_rows)
    return max(parts, max_batch) + max_batch * exact


@dataclass(frozen=True)
class Plan:
    """Work list, on the device.

    Attributes:
        spans: int32 ``[max_batch, 8]``: coded_lo, coded_hi, sink_lo, sink_n, recent_lo, recent_n, n, slot. Empty
            ranges have n = 0 or equal ends.
        first: int32 ``[max_batch + 1]``: the items of request b are ``first[b] .. first[b + 1] - 1``.
        items: int32 ``[items, 4]``: request, kind, start, stop; the items of a request follow one another, exact ones
            first. Kind 0, coded: token positions, multiples of 64; what lies outside coded_lo .. coded_hi - 1 is not
            the item's. Kind 1, exact: row x of the request's exact rows is position sink_lo + x for x < sink_n, else
            recent_lo + x - sink_n. Unused items are all zeros: start = stop.
        leads: int32 ``[items, 4]``: what an item's first loads need, so that they wait for one load less. Coded: the
            physical pages of its first four tiles, zeros behind its last one. Exact: sink_lo, sink_n, recent_lo, slot
            of its request.
        parts: Most coded items; more where there are more requests.
        exact_rows: Rows of an exact item.
        windows: S and W, the largest that fit.

    Rows of `spans` and `first` behind the batch of the last update keep what they had.
    """

    spans: Tensor
    first: Tensor
    items: Tensor
    leads: Tensor
    parts: int
    exact_rows: int
    windows: Windows

    @classmethod
    def reserve(
        cls, max_batch: int, *, parts: int, exact_rows: int, windows: Windows, device: torch.device | str
    ) -> Plan:
        """Allocate for up to `max_batch` requests.

        Args:
            max_batch: Most requests of a step.
            parts: Coded items to aim at: programs of one KV head that fill the device.
            exact_rows: Sink and ring rows of one item.
            windows: S and W.
            device: Where the requests are.

        Raises:
            ValueError: sizes out of range, with the numbers.
        """
        if not 1 <= max_batch <= MAX_BATCH:
            raise ValueError(f"{max_batch} requests: a plan has 1 to {MAX_BATCH}")
        if parts < 1 or exact_rows < 1:
            raise ValueError(f"{parts} parts of a plan and {exact_rows} exact rows an item must be positive")
        size = max_items(max_batch, parts, exact_rows, windows)
        spans, first, items, leads = (
            torch.zeros(shape, dtype=torch.int32, device=device)
            for shape in (
                (max_batch, SPAN_FIELDS),
                (max_batch + 1,),
                (size, ITEM_FIELDS),
                (size, LEAD_FIELDS),
            )
        )
        return cls(spans, first, items, leads, parts, exact_rows, windows)

    @property
    def max_batch(self) -> int:
        """Most requests of a step."""
        return self.spans.shape[0]

    @property
    def size(self) -> int:
        """Items, used or not: the grid of whoever works them off."""
        return self.items.shape[0]

    def update(self, requests: Requests, windows: Windows, window: int | None = None) -> None:
        """Fill the plan from the lengths of this step: one launch, no host sync.

        Args:
            requests: The batch, with the page table that decode will have: items keep their first pages.
            windows: S and W, together at most those reserved.
            window: L, None without a sliding window.

        Raises:
            ValueError: more requests or larger windows than reserved, or tensors that do not fit, with the numbers.
            UnsupportedError: no kernel on this platform.
        """
        device, batch = self.items.device, requests.batch
        check_platform(device)
        if not 1 <= batch <= self.max_batch:
            raise ValueError(f"{batch} requests: this plan has room for 1 to {self.max_batch}")
        if windows.sink + windows.recent > self.windows.sink + self.windows.recent:
            raise ValueError(f"windows {windows.sink} + {windows.recent} exceed those reserved, {self.windows}")
        if window is not None and window < 1:
            raise ValueError(f"a sliding window of {window} tokens")
        for name in ("lengths", "slots", "exact_from"):
            check_tensor(name, getattr(requests, name), (batch,), torch.int32, device)
        check_tensor("page_table", requests.page_table, (batch, None), torch.int32, device, contiguous=False)
        block, step = _blocks(batch)
        _plan[(triton.cdiv(max(self.size, batch + 1), step),)](
            requests.lengths,
            requests.exact_from,
            requests.slots,
            requests.page_table,
            self.spans,
            self.first,
            self.items,
            self.leads,
            requests.page_table.stride(0),
            requests.page_table.shape[1],
            batch,
            self.size,
            windows.sink,
            windows.recent,
            UNLIMITED if window is None else window,
            self.parts,
            self.exact_rows,
            REQUESTS=block,
            STEP=step,
            num_warps=4 if block <= 1024 else 8,
        )


@dataclass(frozen=True)
class Partials:
    """What the items of a plan give, to be merged.

    Attributes:
        o: float32 ``[items, Hq, d_v]``: outputs o' in the frame of values, divided by `l`; zeros where an item sees
            nothing.
        ml: float32 ``[items, Hq, 2]``: the largest logit m in log2 units and ``l = sum 2^(logit - m)``; -1e30 and 0
            where an item sees nothing.
        mixed: float32 ``[max_batch, Hq, d_v]``: outputs o' of whole requests, on their way through the merge.
        mass: float32 ``[max_batch, Hq]``: the softmax mass of their rows.
    """

    o: Tensor
    ml: Tensor
    mixed: Tensor
    mass: Tensor

    @classmethod
    def reserve(cls, plan: Plan, q_heads: int, d_v: int) -> Partials:
        """Allocate for the items of a plan."""
        sizes = {"o": (plan.size, d_v), "ml": (plan.size, 2), "mixed": (plan.max_batch, d_v)}
        device = plan.items.device
        parts = {
            name: torch.zeros(rows, q_heads, width, dtype=torch.float32, device=device)
            for name, (rows, width) in sizes.items()
        }
        return cls(**parts, mass=torch.zeros(plan.max_batch, q_heads, dtype=torch.float32, device=device))

    def narrowed(self, plan: Plan) -> Partials | None:
        """Return the same memory as the workspace of another plan, None where it has too little room for that one."""
        items, rows = plan.size, plan.max_batch
        if items > self.o.shape[0] or rows > self.mass.shape[0]:
            return None
        return Partials(self.o[:items], self.ml[:items], self.mixed[:rows], self.mass[:rows])


def _blocks(batch: int) -> tuple[int, int]:
    """Return the requests, a power of two, and the items of a program."""
    block = max(power_of_two(batch), MIN_REQUESTS)
    return block, min(max(COMPARISONS // block, MIN_STEP), MAX_STEP)


@triton.jit
def _ranges(n, exact_from, sink, recent, window):
    """Return coded_lo, coded_hi, sink_lo, sink_n, recent_lo, recent_n of lengths n; see the top of the file."""
    visible = tl.maximum(n - window, 0)
    oldest = tl.maximum(tl.maximum(n - recent, exact_from), sink)
    coded_lo = tl.minimum(tl.maximum(visible, sink), n)
    coded_hi = tl.maximum(tl.minimum(oldest, n), coded_lo)
    sink_n = tl.maximum(tl.minimum(sink, n) - visible, 0)
    recent_lo = tl.maximum(visible, oldest)
    return coded_lo, coded_hi, visible, sink_n, recent_lo, tl.maximum(n - recent_lo, 0)


@triton.jit
def _pages(lo, hi):
    """Return how many pages of 64 tokens the positions lo .. hi - 1 touch."""
    return tl.where(hi > lo, (hi + 63) // 64 - lo // 64, 0)


@triton.jit(
    do_not_specialize=["stride", "columns", "batch", "size", "sink", "recent", "window", "parts", "exact_rows"],
)
def _plan(
    lengths,
    exact_from,
    slots,
    table,
    spans,
    first,
    items,
    leads,
    stride,
    columns,
    batch,
    size,
    sink,
    recent,
    window,
    parts,
    exact_rows,
    REQUESTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write spans, item ranges and items; every program scans all requests and then fills its own STEP items."""
    b = tl.arange(0, REQUESTS)
    inside = b < batch
    n = tl.load(lengths + b, mask=inside, other=0)
    since = tl.load(exact_from + b, mask=inside, other=0)
    coded_lo, coded_hi, sink_lo, sink_n, recent_lo, recent_n = _ranges(n, since, sink, recent, window)
    pages = _pages(coded_lo, coded_hi)
    chunk = tl.maximum(tl.cdiv(tl.sum(pages, 0), tl.maximum(parts - batch, 1)), 1)
    count = tl.where(inside, tl.cdiv(pages, chunk) + tl.cdiv(sink_n + recent_n, exact_rows), 0)
    stops = tl.cumsum(count, 0)
    begins = stops - count
    used = tl.sum(count, 0)
    if tl.program_id(0) == 0:
        tl.store(first + b, begins, mask=inside)
        tl.store(first + batch, used)
        row = spans + b * 8
        tl.store(row, coded_lo, mask=inside)
        tl.store(row + 1, coded_hi, mask=inside)
        tl.store(row + 2, sink_lo, mask=inside)
        tl.store(row + 3, sink_n, mask=inside)
        tl.store(row + 4, recent_lo, mask=inside)
        tl.store(row + 5, recent_n, mask=inside)
        tl.store(row + 6, n, mask=inside)
        tl.store(row + 7, tl.load(slots + b, mask=inside, other=0), mask=inside)
    item = tl.program_id(0) * STEP + tl.arange(0, STEP)
    # The owner is the last request that begins at or before the item: those without items share their beginning
    # with the next one.
    before = (begins[None, :] <= item[:, None]) & inside[None, :]
    owner = tl.sum(before.to(tl.int32), 1) - 1
    place = item - tl.max(tl.where(before, begins[None, :], 0), 1)
    valid = item < used
    own_n = tl.load(lengths + owner, mask=valid, other=0)
    own_since = tl.load(exact_from + owner, mask=valid, other=0)
    lo, hi, own_sink_lo, own_sinks, own_recent_lo, own_recent = _ranges(own_n, own_since, sink, recent, window)
    rows = own_sinks + own_recent
    exact = tl.cdiv(rows, exact_rows)
    is_exact = place < exact
    # Coded items differ by at most one page.
    total = _pages(lo, hi)
    share = tl.maximum(tl.cdiv(total, chunk), 1)
    part = place - exact
    page = lo // 64 + part * (total // share) + tl.minimum(part, total % share)
    taken = total // share + tl.where(part < total % share, 1, 0)
    start = tl.where(is_exact, place * exact_rows, page * 64)
    stop = tl.where(is_exact, tl.minimum(start + exact_rows, rows), (page + taken) * 64)
    held = item < size
    out = items + item * 4
    tl.store(out, tl.where(valid, owner, 0), mask=held)
    tl.store(out + 1, tl.where(valid & is_exact, 1, 0), mask=held)
    tl.store(out + 2, tl.where(valid, start, 0), mask=held)
    tl.store(out + 3, tl.where(valid, stop, 0), mask=held)
    own_slot = tl.load(slots + owner, mask=valid & is_exact, other=0)
    out = leads + item * 4
    for tile in tl.static_range(4):
        at = page + tile
        physical = table + owner.to(tl.int64) * stride + at
        lead = tl.load(physical, mask=valid & ~is_exact & (tile < taken) & (at < columns), other=0)
        own = (own_sink_lo, own_sinks, own_recent_lo, own_slot)[tile]
        tl.store(out + tile, tl.where(valid & is_exact, own, lead), mask=held)


def variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """Return what is compiled for a device: name, function, signature, constants, options."""
    pointers = ("lengths", "exact_from", "slots", "table", "spans", "first", "items", "leads")
    numbers = ("stride", "columns", "batch", "size", "sink", "recent", "window", "parts", "exact_rows")
    signature = dict.fromkeys(pointers, "*i32") | dict.fromkeys(numbers, "i32")
    found = []
    for batch in (1, 256, MAX_BATCH):
        block, step = _blocks(batch)
        found.append(
            (
                f"plan-{batch}",
                _plan,
                signature,
                {"REQUESTS": block, "STEP": step},
                {"num_warps": 4 if block <= 1024 else 8},
            )
        )
    return found
