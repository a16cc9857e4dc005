"""Artifacts as runners of the model-level tasks: one host an artifact, all attached to the same model at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvcq.codecs.pair import HeadCodec
from kvcq.evaluation.gates import REFERENCE
from kvcq.evaluation.rows import bf16_rows
from kvcq.models.library import forward
from kvcq.models.load import LoadedModel
from kvcq.pipeline.eligible import bf16_reason
from kvcq.pipeline.requests import ValidateRequest
from kvcq.pipeline.subjects import Subject
from kvcq.runtime.hf.cache import Host, refuse_unpaged
from kvcq.runtime.hf.semantics import ByQuery, Deferred, Semantics, Served
from kvcq.spec.boundary import served_boundaries
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.plan import Windows
from kvcq.spec.tasks import CacheMode

Codecs = Mapping[int, HeadCodec]
Rule = Callable[[int], Semantics]

# Rows of the reference are all the same, exact or "decoded"; one tier is the cheapest.
WHOLE = Windows(sink=0, recent=1 << 40)


class CacheSession:
    """One request of one model on one cache."""

    def __init__(self, model: Any, cache: Any) -> None:
        self._model, self._cache = model, cache
        self.length = 0

    def extend(self, tokens: Tensor, keep: int = 1) -> Tensor:
        """Append tokens ``[n]`` by one forward and return the logits ``[min(keep, n), vocab]`` of the last rows."""
        logits = forward(self._model, tokens[None], cache=self._cache, keep=keep)[0]
        self.length += len(tokens)
        return logits


@dataclass(frozen=True)
class CacheRunner:
    """One artifact, or the BF16 reference: `rule` gives the semantics of a prompt's length."""

    name: str
    host: Host
    rule: Rule

    def start(self, prompt: int) -> CacheSession:
        """Return a session with an empty cache for a prompt of so many tokens."""
        return CacheSession(self.host.model, self.host.new_cache(self.rule(prompt)))


def cache_mode(codecs: Codecs, request: ValidateRequest) -> CacheMode:
    """Return the cache that an artifact is read through.

    ``auto`` is packed where pages hold all its codes, and the prompt needs no more exact rows than they keep.

    Raises:
        UnsupportedError: ``packed`` is wanted and a codec is for accuracy only; names the layer.
    """
    if request.cache == "packed":
        for layer, codec in codecs.items():
            refuse_unpaged(layer, codec)
    if request.cache != "auto":
        return request.cache
    served = all(side.spec.served for codec in codecs.values() for side in (codec.k, codec.v))
    return "packed" if codecs and served and request.semantics != "deferred" else "simulate"


def rule_of(request: ValidateRequest) -> Rule:
    """Return what the request's semantics say of a prompt of a given length."""
    if request.semantics == "served":
        return lambda prompt: Served(prompt, served_boundaries(prompt, request.chunk, request.cached_at))
    if request.semantics == "deferred":
        return Deferred
    return lambda prompt: ByQuery()


@contextmanager
def open_runners(
    loaded: LoadedModel,
    geometry: ModelGeometry,
    subjects: Sequence[tuple[Subject, Codecs]],
    request: ValidateRequest,
) -> Iterator[list[CacheRunner]]:
    """Attach the BF16 reference and every artifact to the model, in this order; detached on exit.

    The reference rounds the rows of all quantizable layers to bfloat16, whatever the model computes in. A simulated
    cache does the same for layers that its artifact keeps in BF16; a packed one leaves them to the library.
    """
    rounded = {layer.layer: bf16_rows() for layer in geometry.quantizable() if bf16_reason(layer) is None}
    rule = rule_of(request)
    with ExitStack() as stack:
        runners = []
        hosts: list[tuple[str, Codecs, Windows, CacheMode]] = [(REFERENCE, rounded, WHOLE, "simulate")]
        for subject, codecs in subjects:
            mode = cache_mode(codecs, request)
            own = {**rounded, **codecs} if mode == "simulate" else dict(codecs)
            # An artifact without codes is the reference: the same tier, to the last bit.
            hosts.append((subject.name, own, subject.windows if codecs else WHOLE, mode))
        for name, held, windows, mode in hosts:
            host = Host(loaded.model, held, geometry, windows, mode=mode)
            runners.append(CacheRunner(name, stack.enter_context(host), rule))
        yield runners
