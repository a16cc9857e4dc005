"""What fits into the GPUs, by arithmetic, before SGLang is started: it measures for itself what is left."""

from __future__ import annotations

from dataclasses import dataclass

from kvcq.artifacts.bundle import Bundle
from kvcq.errors import InputError, shown
from kvcq.pipeline.sglang.arguments import Given
from kvcq.pipeline.sglang.machine import Gpu
from kvcq.reports.text import size
from kvcq.runtime.layout import kv_bytes_per_token
from kvcq.runtime.sglang.configurator import PoolPlan, pool_plan
from kvcq.spec.manifest import Manifest

FRACTION = "mem_fraction_static"
# SGLang chooses by the GPU and by the size of its graphs; its choices lie around this one.
USUAL_FRACTION = 0.85


@dataclass(frozen=True)
class Memory:
    """The cache of one rank.

    Attributes:
        pool: Bytes of a token and of the exact rows.
        ranks: Of tensor parallelism.
        bf16_cell: Bytes of a token in BF16, on one rank.
        available: Bytes for the cache by estimate; None where the size of the weights is not known yet.
    """

    pool: PoolPlan
    ranks: int
    bf16_cell: int
    available: int | None

    @property
    def tokens(self) -> int | None:
        """Tokens that fit, by estimate.

        Raises:
            ResourceError: not a page does.
        """
        return None if self.available is None else self.pool.tokens(self.available)

    @property
    def bf16_tokens(self) -> int | None:
        """Tokens that a BF16 cache would hold in the same memory."""
        return None if self.available is None else max(self.available, 0) // self.bf16_cell

    def beside(self, tokens: int) -> int:
        """Return the tokens that BF16 would hold in the memory of a pool of so many."""
        return (tokens * self.pool.cell + self.pool.bias) // self.bf16_cell

    def line(self) -> str:
        """Return the estimate for people."""
        exact = f"{size(self.pool.bias)} of exact rows for {self.pool.requests} requests"
        if self.available is None:
            return f"memory: {exact}; the weights are not on this machine yet, so nothing is known of the rest"
        return (
            f"memory: about {size(self.available)} for the cache of a GPU, {exact}: about {self.tokens} tokens, "
            f"BF16 would hold {self.bf16_tokens}"
        )


def plan_memory(
    bundle: Bundle, given: Given, running: int, gpu: Gpu, weight_bytes: int, entries: int | None = None
) -> Memory:
    """Divide the memory of one GPU.

    Args:
        bundle: What is served.
        given: Flags for SGLang.
        running: Requests that run at once.
        gpu: The smallest of those that will be used.
        weight_bytes: Of the whole model, 0 where not known.
        entries: Beginnings whose exact rows are kept; None: as many as `running`.

    Raises:
        ResourceError: no page fits beside the weights and the exact rows.
        InputError: a share of the memory that is none.
        MismatchError: ranks that cannot share the KV heads.
        UnsupportedError: a layer without pages.
    """
    manifest, ranks = bundle.manifest, given.number("tp_size", 1)
    pool = pool_of(manifest, ranks, running, entries)
    bf16 = round(kv_bytes_per_token((), manifest.geometry)) * pool.heads // manifest.geometry.layers[0].kv_heads
    available = int(gpu.memory * _fraction(given)) - weight_bytes // ranks if weight_bytes else None
    memory = Memory(pool, ranks, bf16, available)
    # Raises where nothing fits.
    _ = memory.tokens
    return memory


def pool_of(manifest: Manifest, ranks: int, running: int, entries: int | None = None) -> PoolPlan:
    """Return what the pool of every rank looks like."""
    return pool_plan(
        manifest.plan,
        manifest.geometry,
        manifest.recipe.windows,
        digest=manifest.digest,
        tp=ranks,
        requests=running,
        entries=entries,
    )


def _fraction(given: Given) -> float:
    value = given.values.get(FRACTION, USUAL_FRACTION)
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = 0.0
    if not 0.0 < share < 1.0:
        raise InputError(f"{shown(value)} is no share of the memory", where="--mem-fraction-static")
    return share
