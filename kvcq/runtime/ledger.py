"""Who owns which page: the slots of a bounded engine, in plain Python.

Coded rows lie in pages of 64 tokens. A page may serve several requests that start with the same tokens; it is free
again only when the last of them has let go. Exact rows lie in one buffer a running request and are never shared. A
request's whole budget, prompt and new tokens, is reserved when it is admitted, so that what was admitted can finish::

    admit("a", 200)            pages 0 1 2 3    buffer 0
    fork("a", "b", 150, 130)   pages 0 1 4      buffer 1    two whole pages are shared, the third is b's own
    keep("b", "prefix", 150)   pages 0 1                    no buffer: it only holds what later requests may share
    release("b")               page 4 and buffer 1 are free
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvcq.errors import ResourceError
from kvcq.runtime.layout import PAGE


class Full(ResourceError):
    """There is no room now.

    Attributes:
        ever: Whether there would be room if everything else were released: wait if so, refuse the request if not.
    """

    def __init__(self, request_id: str, need: str, free: int, total: int, *, ever: bool) -> None:
        super().__init__(f"request {request_id} needs {need}, {free} of {total} are free")
        self.ever = ever


@dataclass
class _Entry:
    tokens: int
    pages: list[int]
    buffer: int | None


def page_count(tokens: int) -> int:
    """Return the pages of 64 tokens that hold `tokens` tokens."""
    return -(-tokens // PAGE)


def workspace_tokens(context: int, chunk: int) -> int:
    """Return the most rows that one forward has before it: whole pages of history, and its own rows.

    The maximum over every forward of 1..`chunk` rows that ends within `context`, wherever it starts: a prefix that is
    found shifts the borders of the chunks, so the multiples of `chunk` are not the worst case.

    Args:
        context: Longest request, tokens.
        chunk: Most tokens of a forward.

    Raises:
        ValueError: not positive.
    """
    if context < 1 or chunk < 1:
        raise ValueError(f"context and chunk must be positive, not {context} and {chunk}")
    most = min(context, chunk)
    # n new rows end at `context`; the pages before them are padded by (n - context) mod 64.
    return context + max((new - context) % PAGE for new in range(max(1, most - PAGE + 1), most + 1))


class Ledger:
    """Pages and buffers by request. Every method either does all of its work or raises and changes nothing.

    Not safe for threads: one engine loop owns it.
    """

    def __init__(self, pages: int, buffers: int | None = None) -> None:
        """Start with everything free.

        Args:
            pages: Pages of 64 tokens in all.
            buffers: Buffers of exact rows, the most requests that run at once; None: as many as pages.

        Raises:
            ValueError: not positive.
        """
        buffers = pages if buffers is None else buffers
        if pages < 1 or buffers < 1:
            raise ValueError(f"pages and buffers must be positive, not {pages} and {buffers}")
        self.pages, self.buffers = pages, buffers
        self._free_pages = list(reversed(range(pages)))
        self._free_buffers = list(reversed(range(buffers)))
        self._owners = [0] * pages
        self._entries: dict[str, _Entry] = {}

    @property
    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return len(self._free_pages)

    @property
    def free_buffers(self) -> int:
        """Buffers that nobody owns."""
        return len(self._free_buffers)

    def __contains__(self, request_id: str) -> bool:
        """Say whether a request or kept prefix of this name holds pages."""
        return request_id in self._entries

    def pages_of(self, request_id: str) -> tuple[int, ...]:
        """Return the pages of a request in the order of its tokens.

        Raises:
            ValueError: no such request.
        """
        return tuple(self._entry(request_id).pages)

    def buffer_of(self, request_id: str) -> int | None:
        """Return the buffer of a request, None for a kept prefix.

        Raises:
            ValueError: no such request.
        """
        return self._entry(request_id).buffer

    def admit(self, request_id: str, tokens: int) -> None:
        """Reserve pages and a buffer for a request of at most `tokens` tokens, prompt and answer.

        Raises:
            Full: too few pages, or no buffer.
            ValueError: the name is taken, or `tokens` is not positive.
        """
        self._enter(request_id, tokens, [])

    def fork(self, source: str, request_id: str, tokens: int, shared: int) -> None:
        """Admit a request whose first `shared` tokens are those of `source`; the whole pages among them are shared.

        That `source` has computed these tokens already is the caller's to know: nobody writes a shared page again.

        Raises:
            Full: too few pages for the rest, or no buffer.
            ValueError: no such source, the name is taken, or more shared tokens than one of the two has.
        """
        entry = self._entry(source)
        if not 0 <= shared <= min(tokens, entry.tokens):
            raise ValueError(f"{shared} shared of {tokens} and {entry.tokens} tokens")
        self._enter(request_id, tokens, entry.pages[: shared // PAGE])

    def keep(self, source: str, name: str, tokens: int) -> None:
        """Hold the whole pages of the first `tokens` tokens of `source` under another name, without a buffer.

        Raises:
            ValueError: no such source, the name is taken, or not one whole page.
        """
        entry = self._entry(source)
        if not PAGE <= tokens <= entry.tokens:
            raise ValueError(f"{tokens} of {entry.tokens} tokens hold no whole page to keep")
        self._refuse_taken(name)
        pages = entry.pages[: tokens // PAGE]
        self._share(pages)
        self._entries[name] = _Entry(len(pages) * PAGE, pages, None)

    def grow(self, request_id: str, tokens: int) -> None:
        """Raise the budget of a running request to `tokens` tokens in all; a smaller number changes nothing.

        Raises:
            Full: too few pages; the request keeps what it has.
            ValueError: no such request, or a kept prefix.
        """
        entry = self._entry(request_id)
        if entry.buffer is None:
            raise ValueError(f"{request_id} is a kept prefix and does not grow")
        if tokens > entry.tokens:
            entry.pages += self._take(request_id, tokens, len(entry.pages))
        entry.tokens = max(entry.tokens, tokens)

    def release(self, request_id: str) -> None:
        """Let go of everything that a request holds: it has finished, is retracted, or its prefix is evicted.

        Raises:
            ValueError: no such request, or it was released before.
        """
        entry = self._entry(request_id)
        del self._entries[request_id]
        for page in reversed(entry.pages):
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free_pages.append(page)
        if entry.buffer is not None:
            self._free_buffers.append(entry.buffer)

    def check(self) -> None:
        """Hold the books against what the requests hold.

        Raises:
            RuntimeError: a page or buffer is lost, free and owned, or owned otherwise than counted: a bug.
        """
        held = Counter(page for entry in self._entries.values() for page in entry.pages)
        free = Counter(self._free_pages)
        for page, counted in enumerate(self._owners):
            if held[page] != counted or free[page] != (counted == 0):
                what = f"page {page} has {held[page]} owners, {counted} are counted, and is {free[page]} times free"
                raise RuntimeError(what)
        buffers = Counter(self._free_buffers)
        buffers.update(entry.buffer for entry in self._entries.values() if entry.buffer is not None)
        if buffers != Counter(range(self.buffers)):
            raise RuntimeError("a buffer of exact rows is lost or has two owners")
        for name, entry in self._entries.items():
            if len(entry.pages) != page_count(entry.tokens) or len(set(entry.pages)) != len(entry.pages):
                raise RuntimeError(f"{name} has {len(entry.pages)} pages for {entry.tokens} tokens, or one twice")

    def _enter(self, request_id: str, tokens: int, shared: list[int]) -> None:
        self._refuse_taken(request_id)
        if tokens < 1:
            raise ValueError(f"{request_id} has {tokens} tokens")
        if not self._free_buffers:
            raise Full(request_id, "a buffer of exact rows", 0, self.buffers, ever=page_count(tokens) <= self.pages)
        own = self._take(request_id, tokens, len(shared))
        self._share(shared)
        self._entries[request_id] = _Entry(tokens, [*shared, *own], self._free_buffers.pop())

    def _take(self, request_id: str, tokens: int, held: int) -> list[int]:
        """Own the pages that `tokens` tokens need beyond those held."""
        whole = page_count(tokens)
        count = whole - held
        if count > len(self._free_pages):
            need = f"{count} pages of {PAGE} tokens"
            raise Full(request_id, need, len(self._free_pages), self.pages, ever=whole <= self.pages)
        taken = [self._free_pages.pop() for _ in range(count)]
        self._share(taken)
        return taken

    def _share(self, pages: list[int]) -> None:
        for page in pages:
            self._owners[page] += 1

    def _entry(self, request_id: str) -> _Entry:
        if request_id not in self._entries:
            raise ValueError(f"{request_id} is not admitted")
        return self._entries[request_id]

    def _refuse_taken(self, request_id: str) -> None:
        if request_id in self._entries:
            raise ValueError(f"{request_id} is admitted already")
