"""A host in plain Python that schedules as SGLang does, over a device that only remembers who wrote which row.

Overlap is played at its worst: a forward may run only when the host has scheduled the one after it, and results may be
known one forward late, so requests that are finished, aborted or retracted write once more, into what may be another's.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from kvcq.runtime.layout import PAGE
from kvcq.runtime.sglang import admission
from kvcq.runtime.sglang.store import SinkStore
from kvcq.spec.plan import Windows
from tests.runtime.sglang.device import LONGEST, Device, Forward, Range, Req


def _plain_cap(self: Req, input_len: int) -> int:
    return max(input_len - 1, 0)


class Rows:
    """``ReqToTokenPool``: rows from 1 on, taken from the front and given back at the end."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free_slots = list(range(1, size + 1))

    def alloc(self, reqs: list[Req]) -> list[int] | None:
        need = [req for req in reqs if req.req_pool_idx is None]
        if len(need) > len(self.free_slots):
            return None
        for req in need:
            req.req_pool_idx = self.free_slots.pop(0)
        rows = [req.req_pool_idx for req in reqs]
        admission.sink_bind(rows, self, reqs)
        return rows

    def free(self, req: Req) -> None:
        admission.sink_unpin(self, req)
        self.free_slots.append(req.req_pool_idx)
        req.req_pool_idx = None

    def clear(self) -> None:
        self.free_slots = list(range(1, self.size + 1))
        admission.sink_clear(None, self)


@dataclass(eq=False)
class Node:
    """A page of the radix tree."""

    page: int = 0
    parent: Node | None = None
    key: object = None
    children: dict = field(default_factory=dict)
    locks: int = 0
    used: int = 0


class Tree:
    """Pages by the tokens before them; leaves that nobody holds can be evicted, the one unused for longest first."""

    def __init__(self) -> None:
        self.root, self.clock = Node(), count()
        self.nodes: set[Node] = set()

    @staticmethod
    def keys(ids: array, limit: int, extra_key: str | None) -> list[object]:
        raw = ids[: limit // PAGE * PAGE].tobytes()
        step = PAGE * ids.itemsize
        return [(extra_key if at == 0 else None, raw[at : at + step]) for at in range(0, len(raw), step)]

    def match(self, keys: list[object]) -> list[Node]:
        found, node = [], self.root
        for key in keys:
            node = node.children.get(key)
            if node is None:
                break
            node.used = next(self.clock)
            found.append(node)
        return found

    def insert(self, keys: list[object], pages: list[int]) -> list[Node]:
        path, node = [], self.root
        for key, page in zip(keys, pages, strict=True):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(page, node, key)
                self.nodes.add(child)
            child.used = next(self.clock)
            path.append(child)
            node = child
        return path

    def lock(self, path: list[Node], by: int) -> None:
        for node in path:
            node.locks += by

    def evict(self) -> int | None:
        leaves = [node for node in self.nodes if not node.children and not node.locks]
        if not leaves:
            return None
        leaf = min(leaves, key=lambda node: node.used)
        del leaf.parent.children[leaf.key]
        self.nodes.discard(leaf)
        return leaf.page


class Host:
    """A scheduler with chunked prefill, radix reuse, eviction, retraction, aborts and flushes."""

    def __init__(
        self, seed: int, *, windows: Windows, requests: int, entries: int, pages: int, budget: int, overlap: bool = True
    ) -> None:
        self.random, self.overlap = random.Random(seed), overlap
        self.rows, self.tree = Rows(requests), Tree()
        self.device = Device(windows, requests + 1, entries, pages)
        self.store = SinkStore(windows, requests + 1, entries)
        self.total, self.free = pages, list(range(1, pages + 1))
        self.budget = budget
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.chunked: Req | None = None
        self.pending: Forward | None = None
        self.names, self.salt = count(), 0
        self.done: list[Req] = []
        self.seen: Counter[str] = Counter()
        self.beginnings = [self._tokens(320) for _ in range(5)]
        admission.uninstall()
        admission.install(self.store)

    def _tokens(self, n: int) -> list[int]:
        return [self.random.randrange(50) for _ in range(n)]

    # What users do.

    def arrive(self) -> None:
        draw = self.random.random()
        if draw < 0.35 and self.done:
            # The next turn of a conversation.
            before = self.random.choice(self.done)
            start, extra_key = before.future[: before.known].tolist(), before.extra_key
        else:
            start = list(self.random.choice(self.beginnings)) if draw < 0.9 else []
            start = start[: self.random.choice((320, 320, 200, 96, 64, 40))]
            extra_key = self.random.choice((None, None, None, "tenant"))
        length = len(start) + self.random.choice((1, 5, 40, 200, 400))
        out = self.random.choice((1, 8, 70, 160))
        length = min(length, LONGEST - out - 2)
        ids = (start + self._tokens(length))[:length] + self._tokens(out + 2)
        embeds = [1] if self.random.random() < 0.08 else None
        req = Req(f"r{next(self.names)}", np.asarray(ids, dtype=np.int64), length, extra_key, embeds)
        if -(-len(ids) // PAGE) + 2 <= self.total:
            self.waiting.append(req)

    def abort(self) -> None:
        everyone = [*self.waiting, *self.running, *([self.chunked] if self.chunked else [])]
        if not everyone:
            return
        req = self.random.choice(everyone)
        self.seen["abort"] += 1
        if req in self.waiting:
            self.waiting.remove(req)
        elif req is self.chunked:
            self.seen["abort between chunks"] += 1
            self.chunked = None
            self._release(req, insert=self.random.random() < 0.5)
        else:
            req.aborted = True

    def flush(self) -> bool:
        if self.running or self.chunked or self.pending:
            return False
        self.tree = Tree()
        self.rows.clear()
        self.free = list(range(1, self.total + 1))
        # Other weights: what was computed before means nothing now.
        self.salt += 1
        self.seen["flush"] += 1
        return True

    # The loop of the scheduler.

    def step(self) -> None:
        late = self.pending
        batch = self._prefill() or self._decode()
        if late is not None:
            # The latest time at which it can run: the host has scheduled the next one already.
            self._run(late)
        # Without overlap for this batch, results are known before it starts.
        known = late is not None and self.random.random() < 0.3
        if known:
            self._results(late)
        if batch is not None:
            if batch.extend:
                self.device.buffers.apply(self.store.drain())
            if self.random.random() < 0.5:
                self._run(batch)
        self.pending = batch
        if late is not None and not known:
            self._results(late)
        if batch is not None and not self.overlap:
            self._run(batch)
            self._results(batch)
            self.pending = None

    def _run(self, forward: Forward) -> None:
        if not forward.ran:
            self.device.run(forward, self.salt)
        forward.ran = True

    def idle(self) -> bool:
        return not (self.waiting or self.running or self.chunked or self.pending)

    def _take(self, number: int) -> list[int] | None:
        while len(self.free) < number:
            page = self.tree.evict()
            if page is None:
                return None
            self.seen["evict"] += 1
            self.free.append(page)
        taken, self.free = self.free[:number], self.free[number:]
        return taken

    def _prefill(self) -> Forward | None:
        budget, batch = self.budget, []
        if self.chunked is not None:
            req = self.chunked
            # Stashed: what the chunk before computed is in the tree from now on, its forward may not have run yet.
            self._share(req)
            req.prefix_indices = range(req.kv)
            end = min(req.known, req.kv + budget)
            pages = self._take(-(-end // PAGE) - len(req.pages))
            if pages is None:
                return None
            req.pages += pages
            budget -= end - req.kv
            self.chunked = req if end < req.known else None
            req.extend_range = Range(req.kv, end)
            batch.append(req)
            self.seen["chunk"] += 1
        while self.waiting and budget >= PAGE and self.chunked is None:
            if len(self.rows.free_slots) <= sum(req.req_pool_idx is None for req in batch):
                break
            req = self.waiting[0]
            limit = admission.match_cap(_plain_cap, req, req.known)
            path = self.tree.match(self.tree.keys(req.full_untruncated_fill_ids, limit, req.extra_key))
            if req.input_embeds:
                path = []
            self.tree.lock(path, 1)
            first = len(path) * PAGE
            end = min(req.known, first + budget // PAGE * PAGE)
            pages = self._take(-(-end // PAGE) - len(path))
            if pages is None:
                self.tree.lock(path, -1)
                break
            self.waiting.pop(0)
            req.node, req.shared = path, len(path)
            req.pages = [node.page for node in path] + pages
            req.kv, req.prefix_indices, req.extend_range = first, range(first), Range(first, end)
            req.life += 1
            budget -= end - first
            self.seen["hit" if first else "miss"] += 1
            batch.append(req)
            if end < req.known:
                self.chunked = req
        if not batch:
            return None
        assert self.rows.alloc(batch) is not None
        entries = []
        for req in batch:
            first, req.kv = req.kv, req.extend_range.end
            entries.append((req, req.life, req.req_pool_idx, first, req.kv, list(req.pages)))
            if req is not self.chunked:
                self.running.append(req)
        return Forward(True, entries)

    def _decode(self) -> Forward | None:
        ready = list(self.running)
        while ready:
            need = sum(req.kv % PAGE == 0 for req in ready)
            pages = self._take(need)
            if pages is not None:
                break
            # Out of pages: one of the running goes back to the queue.
            victim = self.random.choice(ready)
            self.seen["retract"] += 1
            ready.remove(victim)
            self.running.remove(victim)
            self._release(victim, insert=False)
            self.waiting.insert(0, victim)
        entries = []
        for req in ready:
            if req.kv % PAGE == 0:
                req.pages.append(pages.pop())
            # The future of a request ends with a spare token for the forward too many.
            req.kv = min(req.kv + 1, len(req.future))
            entries.append((req, req.life, req.req_pool_idx, req.kv - 1, req.kv, list(req.pages)))
        return Forward(False, entries) if entries else None

    def _results(self, forward: Forward) -> None:
        for req, life, _, _, end, _ in forward.entries:
            if req.life != life or req.req_pool_idx is None or end < req.known:
                continue
            req.known += 1
            if req.aborted or req.known >= len(req.future) - 1:
                self.running.remove(req)
                req.kv = min(req.kv, req.known - 1)
                self._release(req, insert=not req.aborted)
                if not req.aborted and not req.input_embeds:
                    self.done.append(req)
                    del self.done[:-30]
            elif forward.extend:
                self._share(req)

    # Who owns pages.

    def _share(self, req: Req) -> None:
        """``cache_unfinished_req``: whole pages go to the tree, pages that it has already are given back."""
        if req.input_embeds:
            return
        whole = min(req.kv, req.known) // PAGE
        path = self.tree.insert(
            self.tree.keys(req.full_untruncated_fill_ids, whole * PAGE, req.extra_key), req.pages[:whole]
        )
        for index in range(req.shared, whole):
            if path[index].page != req.pages[index]:
                self.free.append(req.pages[index])
                req.pages[index] = path[index].page
        self.tree.lock(path, 1)
        self.tree.lock(req.node, -1)
        req.node, req.shared = path, whole

    def _release(self, req: Req, *, insert: bool) -> None:
        if insert:
            self._share(req)
        self.tree.lock(req.node, -1)
        self.free += req.pages[req.shared :]
        req.pages, req.node, req.shared, req.kv = [], [], 0, 0
        req.life += 1
        self.rows.free(req)

    def check(self) -> None:
        """No page is lost or owned twice, no row either, and the store's books are right."""
        holders = [*self.running, *([self.chunked] if self.chunked else [])]
        owned = Counter(self.free)
        owned.update(node.page for node in self.tree.nodes)
        for req in holders:
            owned.update(req.pages[req.shared :])
        assert owned == Counter(range(1, self.total + 1)), "pages are lost or owned twice"
        rows = Counter(self.rows.free_slots)
        rows.update(req.req_pool_idx for req in holders)
        assert rows == Counter(range(1, self.rows.size + 1)), "rows are lost or owned twice"
        assert self.store.occupancy.rows == len(holders)
        self.store.check()
