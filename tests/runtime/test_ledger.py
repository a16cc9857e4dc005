import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvcq.errors import ResourceError
from kvcq.runtime.layout import PAGE
from kvcq.runtime.ledger import Full, Ledger, page_count, workspace_tokens


def test_the_picture_of_the_docstring():
    ledger = Ledger(8, buffers=2)
    ledger.admit("a", 200)
    ledger.fork("a", "b", 150, 130)
    assert (ledger.pages_of("a"), ledger.buffer_of("a")) == ((0, 1, 2, 3), 0)
    assert (ledger.pages_of("b"), ledger.buffer_of("b")) == ((0, 1, 4), 1)
    ledger.keep("b", "prefix", 150)
    ledger.release("b")
    assert (ledger.pages_of("prefix"), ledger.buffer_of("prefix")) == ((0, 1), None)
    assert (ledger.free_pages, ledger.free_buffers) == (4, 1)
    ledger.release("a")
    assert (ledger.free_pages, "a" in ledger, "prefix" in ledger) == (6, False, True)
    ledger.check()


def test_what_does_not_fit_is_refused_with_numbers_and_nothing_changes():
    ledger = Ledger(10, buffers=2)
    ledger.admit("a", 5 * PAGE)
    with pytest.raises(Full, match="request b needs 6 pages of 64 tokens, 5 of 10 are free") as wait:
        ledger.admit("b", 5 * PAGE + 1)
    assert wait.value.ever and isinstance(wait.value, ResourceError)
    with pytest.raises(Full, match="needs 11 pages") as never:
        ledger.admit("b", 10 * PAGE + 1)
    assert not never.value.ever
    with pytest.raises(Full, match="needs 6 pages of 64 tokens, 5 of 10") as never:
        ledger.grow("a", 11 * PAGE)
    assert not never.value.ever
    with pytest.raises(Full, match="needs 6 pages"):
        ledger.fork("a", "b", 8 * PAGE, 3 * PAGE - 1)
    assert ledger.free_pages == 5 and len(ledger.pages_of("a")) == 5 and "b" not in ledger
    ledger.fork("a", "b", 8 * PAGE, 3 * PAGE)
    with pytest.raises(Full, match="request c needs a buffer of exact rows, 0 of 2 are free") as wait:
        ledger.admit("c", 1)
    assert wait.value.ever
    ledger.check()


def test_budgets_grow_by_pages_and_never_shrink():
    ledger = Ledger(4)
    ledger.admit("a", 1)
    for tokens, pages in ((64, 1), (65, 2), (3, 2), (129, 3), (192, 3), (193, 4)):
        ledger.grow("a", tokens)
        assert len(ledger.pages_of("a")) == pages
        ledger.check()


def test_misuse_is_told_and_changes_nothing():
    ledger = Ledger(4)
    ledger.admit("a", 100)
    ledger.keep("a", "prefix", 64)
    for misuse, said in (
        (lambda: ledger.admit("a", 1), "already"),
        (lambda: ledger.keep("a", "prefix", 64), "already"),
        (lambda: ledger.fork("a", "prefix", 100, 0), "already"),
        (lambda: ledger.admit("b", 0), "0 tokens"),
        (lambda: ledger.release("b"), "not admitted"),
        (lambda: ledger.fork("b", "c", 1, 1), "not admitted"),
        (lambda: ledger.fork("a", "b", 200, 101), "101 shared of 200 and 100"),
        (lambda: ledger.fork("a", "b", 50, 51), "51 shared"),
        (lambda: ledger.keep("a", "p", 63), "no whole page"),
        (lambda: ledger.keep("a", "p", 101), "101 of 100"),
        (lambda: ledger.grow("prefix", 100), "does not grow"),
        (lambda: Ledger(0), "positive"),
        (lambda: Ledger(1, 0), "positive"),
        (lambda: workspace_tokens(0, 1), "positive"),
    ):
        with pytest.raises(ValueError, match=said):
            misuse()
    ledger.check()
    assert (ledger.free_pages, ledger.free_buffers) == (2, 3)


@pytest.mark.parametrize(
    "damage",
    [
        lambda ledger: ledger._free_pages.pop(),
        lambda ledger: ledger._free_pages.append(0),
        lambda ledger: ledger._entries["a"].pages.__setitem__(0, 3),
        lambda ledger: ledger._owners.__setitem__(0, 2),
        lambda ledger: ledger._free_buffers.pop(),
        lambda ledger: ledger._free_buffers.append(0),
        lambda ledger: setattr(ledger._entries["a"], "tokens", 300),
    ],
)
def test_the_check_finds_every_kind_of_damage(damage):
    ledger = Ledger(8)
    ledger.admit("a", 130)
    ledger.check()
    damage(ledger)
    with pytest.raises(RuntimeError):
        ledger.check()


class Books(RuleBasedStateMachine):
    """The ledger against a model that only knows which tokens each name stands for."""

    requests = Bundle("requests")
    prefixes = Bundle("prefixes")

    def __init__(self):
        super().__init__()
        self.ledger = Ledger(12, buffers=4)
        self.budget = {}
        self.names = 0

    def name(self):
        self.names += 1
        return f"r{self.names}"

    def attempt(self, needed, action):
        """Run an action that must fit exactly when its pages and its buffer are free."""
        free, buffers = self.ledger.free_pages, self.ledger.free_buffers
        try:
            action()
        except Full:
            assert needed > free or not buffers
            assert (self.ledger.free_pages, self.ledger.free_buffers) == (free, buffers)
            return False
        assert self.ledger.free_pages == free - needed
        return True

    @rule(target=requests, tokens=st.integers(1, 400))
    def admit(self, tokens):
        name = self.name()
        if not self.attempt(page_count(tokens), lambda: self.ledger.admit(name, tokens)):
            return multiple()
        self.budget[name] = tokens
        return name

    @rule(target=requests, source=st.one_of(requests, prefixes), more=st.integers(0, 300), data=st.data())
    def fork(self, source, more, data):
        name, shared = self.name(), data.draw(st.integers(0, self.budget[source]))
        tokens = max(shared + more, 1)
        needed = page_count(tokens) - shared // PAGE
        if not self.attempt(needed, lambda: self.ledger.fork(source, name, tokens, shared)):
            return multiple()
        self.budget[name] = tokens
        assert self.ledger.pages_of(name)[: shared // PAGE] == self.ledger.pages_of(source)[: shared // PAGE]
        return name

    @rule(source=requests, tokens=st.integers(1, 600))
    def grow(self, source, tokens):
        before = self.ledger.pages_of(source)
        needed = max(page_count(tokens) - len(before), 0)
        if needed <= self.ledger.free_pages:
            self.ledger.grow(source, tokens)
            self.budget[source] = max(self.budget[source], tokens)
        else:
            with pytest.raises(Full):
                self.ledger.grow(source, tokens)
        assert self.ledger.pages_of(source)[: len(before)] == before

    @rule(target=prefixes, source=requests)
    def keep(self, source):
        if self.budget[source] < PAGE:
            return multiple()
        name = self.name()
        self.ledger.keep(source, name, self.budget[source])
        self.budget[name] = self.budget[source] // PAGE * PAGE
        return name

    @rule(name=consumes(requests))
    def finish(self, name):
        self.ledger.release(name)
        del self.budget[name]

    @rule(name=consumes(prefixes))
    def evict(self, name):
        self.finish(name)

    @invariant()
    def holds(self):
        self.ledger.check()
        assert all(len(self.ledger.pages_of(name)) == page_count(tokens) for name, tokens in self.budget.items())


Books.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestBooks = Books.TestCase


def test_random_steps_mix_no_tokens_and_lose_no_page():
    """1e5 steps: admit, fork, grow, finish (keeping a prefix), retract, evict; pages hold what was written."""
    rng, ledger = random.Random(7), Ledger(48, buffers=6)
    running, kept, content = {}, {}, {}
    refused = 0

    def fill(name, text, start):
        for page, at in zip(ledger.pages_of(name)[start:], range(start, page_count(len(text))), strict=True):
            content[page] = text[at * PAGE : (at + 1) * PAGE]

    for step in range(100_000):
        name, kind = f"r{step}", rng.random()
        try:
            if kind < 0.25:
                text = (step,) * rng.randrange(1, 500)
                ledger.admit(name, len(text))
                running[name] = text
                fill(name, text, 0)
            elif kind < 0.55 and (running or kept):
                source = rng.choice([*running, *kept])
                known = running.get(source) or kept[source]
                shared = rng.randrange(len(known) + 1)
                text = known[:shared] + (step,) * rng.randrange(1, 300)
                ledger.fork(source, name, len(text), shared)
                running[name] = text
                fill(name, text, shared // PAGE)
            elif kind < 0.65 and running:
                source = rng.choice(list(running))
                old = running[source]
                text = old + (old[-1],) * rng.randrange(100)
                ledger.grow(source, len(text))
                running[source] = text
                fill(source, text, len(old) // PAGE)
            elif kind < 0.9 and running:
                source = rng.choice(list(running))
                if kind < 0.8 and len(running[source]) >= PAGE:
                    ledger.keep(source, name, len(running[source]))
                    kept[name] = running[source][: len(ledger.pages_of(name)) * PAGE]
                ledger.release(source)
                del running[source]
            elif kept:
                source = rng.choice(list(kept))
                ledger.release(source)
                del kept[source]
        except Full:
            refused += 1
            if kept:
                oldest = next(iter(kept))
                ledger.release(oldest)
                del kept[oldest]
        if step % 20 == 0:
            ledger.check()
            for owner, text in [*running.items(), *kept.items()]:
                for at, page in enumerate(ledger.pages_of(owner)):
                    assert content[page] == text[at * PAGE : (at + 1) * PAGE]
    assert 1000 < refused < 50_000
    for owner in [*running, *kept]:
        ledger.release(owner)
    ledger.check()
    assert (ledger.free_pages, ledger.free_buffers) == (48, 6)


@pytest.mark.parametrize("chunk", [1, 2, 63, 64, 65, 200, 512])
def test_the_workspace_is_what_the_worst_forward_needs(chunk):
    for context in [*range(1, 140), 511, 512, 513]:
        forwards = ((stop - new, new) for stop in range(1, context + 1) for new in range(1, min(chunk, stop) + 1))
        assert workspace_tokens(context, chunk) == max(page_count(start) * PAGE + new for start, new in forwards)


def test_a_workspace_of_a_long_context_covers_every_chunking():
    for context in (131_071, 131_072, 131_073):
        bound = workspace_tokens(context, 8192)
        assert context <= bound < context + PAGE
        for chunk in (8191, 8192):
            for start in range(0, context, chunk):
                assert page_count(start) * PAGE + min(chunk, context - start) <= bound
