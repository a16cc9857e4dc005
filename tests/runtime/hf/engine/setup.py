"""An engine on a tiny model with random codecs, and a client that collects what it is told."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import torch

from kvcq.models.geometry import plan_geometry
from kvcq.runtime.hf.cache import Host
from kvcq.runtime.hf.engine.engine import Engine, Limits
from kvcq.runtime.hf.engine.request import Ask, Done, Failed, Piece, Scored
from kvcq.runtime.hf.engine.sampling import Sampling
from tests.runtime.hf.setup import WINDOWS, codec_of
from tests.tiny import tiny_model, tiny_tokenizer, tiny_tokens

TOKENIZER = tiny_tokenizer()


def decode(ids):
    return TOKENIZER.decode(list(ids), skip_special_tokens=True)


def tiny_host(model_type="llama", **overrides):
    """A model and its host: every full layer coded, as serving casts it."""
    torch.set_num_threads(1)
    model = tiny_model(model_type, **overrides)
    geometry = plan_geometry(model)
    codecs = {layer.layer: codec_of(layer, cast=torch.bfloat16) for layer in geometry.quantizable()}
    return model, Host(model, codecs, geometry, WINDOWS)


@contextmanager
def running(model, host, decode=decode, **limits):
    """A started engine that is closed at the end, with its books checked."""
    engine = Engine(model, host.new_cache, decode, Limits(**{"pages": 64, "chunk": 16} | limits))
    engine.start()
    try:
        yield engine
    finally:
        engine.close(0)
        engine.join(20)
        assert not engine.alive
        assert engine.failure is None, engine.failure
        engine._ledger.check()
        assert engine._ledger.free_pages == engine.limits.pages
        assert engine._ledger.free_buffers == engine.limits.running
        assert engine.cache_bytes() == 0 and not engine.waiting and not engine.running


class Client:
    """Receives the events of one request."""

    def __init__(self, each=None):
        self.text, self.tokens, self.scored = "", [], ()
        self.end = None
        self.ended, self.begun = threading.Event(), threading.Event()
        self._each = each

    def __call__(self, event):
        assert self.end is None, "nothing comes after the end"
        if isinstance(event, Piece):
            self.text += event.text
            self.tokens += event.tokens
            self.begun.set()
        elif isinstance(event, Scored):
            self.scored = event.tokens
        elif isinstance(event, (Done, Failed)):
            self.end = event
            self.ended.set()
        if self._each is not None:
            self._each(event)

    @property
    def ids(self):
        return [token.id for token in self.tokens]

    def wait(self, seconds=60):
        assert self.ended.wait(seconds)
        return self


def ask(seed=0, length=40, max_tokens=12, **options):
    """A seeded random prompt; greedy unless the sampling says otherwise."""
    sampling = options.pop("sampling", Sampling())
    return Ask(tuple(tiny_tokens(length, seed=seed).tolist()), max_tokens, sampling, **options)


def answer(engine, question):
    """Ask one question and wait for the whole answer."""
    client = Client()
    engine.submit([(question, client)])
    return client.wait()
