"""Proof that a bundle is on: asked of the running cache before a server says that it is ready."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
import torch

from kvcq.artifacts.bundle import Bundle
from kvcq.errors import MismatchError
from kvcq.evaluation.canary import ACTIVE, canary_boundary, canary_statistic, canary_verdict
from kvcq.models.library import forward
from kvcq.runtime.hf.cache import Host, QuantizedCache
from kvcq.runtime.hf.semantics import Served
from kvcq.runtime.layout import PAGE, coded_bytes_per_token, window_bytes
from kvcq.spec.boundary import Boundary

AGAIN = "run kvcq verify on the bundle, and validate it again with this model and dtype"


@dataclass(frozen=True)
class Proof:
    """What the running cache has shown.

    Attributes:
        statistic: Canary statistic: near 1 when the cache is quantized as recorded, near 0 when it is not.
        tokens: Tokens of the cache whose memory was compared.
        allocated: Its bytes, equal to the arithmetic of `kvcq.runtime.layout`.
    """

    statistic: float
    tokens: int
    allocated: int


def prove(bundle: Bundle, host: Host) -> Proof:
    """Run the canary through the packed cache and compare its memory with the arithmetic.

    Raises:
        MismatchError: the memory differs, or the canary is not answered as a quantized cache answers it.
        EvaluationError: log-probabilities are not finite.
    """
    canary, windows = bundle.canary, bundle.manifest.recipe.windows
    tokens = torch.from_numpy(canary["tokens"].astype(np.int64))
    boundary = canary_boundary(windows)
    rows = torch.from_numpy(canary["positions"].astype(np.int64)) - boundary
    semantics = Served(tokens.shape[1], (Boundary(boundary, "cached"),))
    answers, allocated = [], 0
    for passage, ids in zip(tokens, torch.from_numpy(canary["ids"].astype(np.int64)), strict=True):
        cache = host.new_cache(semantics)
        forward(host.model, passage[None, :boundary], cache=cache, keep=1)
        logits = forward(host.model, passage[None, boundary:], cache=cache)[0].cpu()
        answers.append(logits[rows].double().log_softmax(-1).gather(-1, ids).numpy())
        allocated = check_memory(bundle, cache, tokens.shape[1])
    statistic = canary_statistic(np.stack(answers), canary["b"], canary["s"])
    if canary_verdict(statistic) != "active":
        raise MismatchError(
            f"the cache does not answer as this bundle does: canary {statistic:.2f}, active is {ACTIVE} or more",
            where="canary",
            fix=AGAIN,
        )
    return Proof(statistic, tokens.shape[1], allocated)


def check_memory(bundle: Bundle, cache: QuantizedCache, tokens: int) -> int:
    """Return the bytes that a cache of one request has allocated.

    Raises:
        MismatchError: they are not those of the layout.
    """
    manifest = bundle.manifest
    coded = round(coded_bytes_per_token(manifest.plan, manifest.geometry)) * ceil(tokens / PAGE) * PAGE
    wanted = coded + window_bytes(manifest.plan, manifest.geometry, manifest.recipe.windows)
    found = cache.allocated_bytes()
    if found != wanted:
        raise MismatchError(
            f"the cache of {tokens} tokens has {found} bytes, the layout has {wanted}", where="memory", fix=AGAIN
        )
    return found
