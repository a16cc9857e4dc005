"""How many tokens fit: the pool of one rank is whole pages, and what its running requests need besides.

::

    available = tokens * cell + bias
    cell      = sum over layers of H * block bytes / 64        one token in all pages of this rank
    bias      = padding page + sinks of rows and entries + rings of rows + 4 bytes a row

Rows are ``--max-running-requests`` and one for padding. SGLang's own default, thousands of requests, would take more
than a GPU has: it must be given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvcq.errors import InputError, MismatchError, ResourceError, UnsupportedError
from kvcq.runtime.layout import BF16_BYTES, PAGE, RING_SLACK, page_bytes
from kvcq.runtime.sglang.ranks import local_heads
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.plan import LayerPlan, Windows

_MAX_RUNNING = "--max-running-requests"
_OTHER_ENGINE = "serve this bundle with --engine hf"


@dataclass(frozen=True)
class PoolPlan:
    """Everything about the pool of one rank but its tokens.

    Attributes:
        digest: Of the bundle.
        blocks: Bytes of a page block, 64 tokens of one KV head, by layer.
        heads: KV heads H on this rank.
        dims: d_k and d_v.
        windows: S and W.
        requests: Most running requests.
        entries: Sinks kept for later requests.
    """

    digest: str
    blocks: tuple[int, ...]
    heads: int
    dims: tuple[int, int]
    windows: Windows
    requests: int
    entries: int

    @property
    def rows(self) -> int:
        """Rows of the request table: SGLang pads batches with row 0."""
        return self.requests + 1

    @property
    def cell(self) -> int:
        """Bytes of one token."""
        return self.heads * sum(self.blocks) // PAGE

    @property
    def request_bytes(self) -> int:
        """Bytes of the exact rows of one running request."""
        return (self.windows.sink + self.windows.recent + RING_SLACK) * self._exact

    @property
    def bias(self) -> int:
        """Bytes that do not depend on the tokens."""
        kept = self.entries * self.windows.sink * self._exact
        return PAGE * self.cell + self.rows * (self.request_bytes + 4) + kept

    @property
    def _exact(self) -> int:
        return len(self.blocks) * self.heads * sum(self.dims) * BF16_BYTES

    def tokens(self, available: int) -> int:
        """Return the tokens, whole pages, that fit into so many bytes.

        Raises:
            ResourceError: not one page; with the numbers.
        """
        tokens = (available - self.bias) // self.cell // PAGE * PAGE
        if tokens < PAGE:
            raise ResourceError(
                f"{available / 2**30:.2f} GiB are left for the cache, {self.requests} running requests take "
                f"{self.bias / 2**30:.2f} GiB of exact rows",
                where=_MAX_RUNNING,
                fix=f"lower {_MAX_RUNNING}, which kvcq serve calls --max-running, or raise --mem-fraction-static",
            )
        return tokens

    def stage(self, start: int, end: int) -> PoolPlan:
        """Return the plan of the layers ``start .. end - 1``, those of one pipeline stage."""
        return replace(self, blocks=self.blocks[start:end])


def pool_plan(
    plan: Sequence[LayerPlan],
    geometry: ModelGeometry,
    windows: Windows,
    *,
    digest: str,
    tp: int,
    requests: int | None,
    entries: int | None = None,
) -> PoolPlan:
    """Return what the pool of every rank looks like.

    Args:
        plan: The bundle's plan.
        geometry: Its geometry.
        windows: Its windows.
        digest: Of the bundle.
        tp: Ranks that share attention.
        requests: Most running requests.
        entries: Sinks kept for later requests, None: as many as running requests.

    Raises:
        InputError: `requests` is missing or not positive, or `entries` is negative.
        MismatchError: `tp` ranks cannot share the KV heads.
        UnsupportedError: a layer stays BF16, is no full attention, or has other heads than the first.
    """
    if requests is None or requests < 1:
        raise InputError(
            f"{requests or 'no'} running requests: every one has exact rows of its own",
            where=_MAX_RUNNING,
            fix=f"pass a number, e.g. {_MAX_RUNNING} 64",
        )
    kept = requests if entries is None else entries
    if kept < 0:
        raise InputError(f"{kept} entries of sinks", where="sink entries", fix="keep 0 or more")
    layers = geometry.layers
    plans = {entry.layer: entry for entry in plan}
    shape = (layers[0].kv_heads, layers[0].d_k, layers[0].d_v)
    blocks = []
    for layer in layers:
        entry, where = plans.get(layer.layer), f"layer {layer.layer}"
        if layer.kind != "full":
            raise UnsupportedError(f"pages hold full attention, not {layer.kind}", where=where, fix=_OTHER_ENGINE)
        if entry is None or entry.k is None or entry.v is None:
            raise UnsupportedError("the bundle keeps this layer in BF16", where=where, fix=_OTHER_ENGINE)
        if (found := (layer.kv_heads, layer.d_k, layer.d_v)) != shape:
            raise UnsupportedError(f"heads and dims {found} beside {shape}", where=where, fix=_OTHER_ENGINE)
        if reason := entry.k.unserved or entry.v.unserved:
            raise UnsupportedError(f"no page holds it: {reason}", where=where, fix=_OTHER_ENGINE)
        blocks.append(page_bytes(entry.k, entry.v, layer.d_k, layer.d_v))
    return PoolPlan(digest, tuple(blocks), local_heads(shape[0], tp), shape[1:], windows, requests, kept)


def check_host(plan: PoolPlan, *, page_size: int, heads: int, dims: tuple[int, int], layers: int) -> None:
    """Check what the host is about to allocate against the plan.

    Raises:
        MismatchError: another page size, or the model has other heads, dims or layers than the bundle.
    """
    check_page(page_size)
    for name, found, wanted in (
        ("KV heads of a rank", heads, plan.heads),
        ("head dims of keys and values", dims, plan.dims),
        ("layers", layers, len(plan.blocks)),
    ):
        if found != wanted:
            raise MismatchError(f"{name}: the model has {found}, the bundle {wanted}", where="model")


def make_configurator(plan: PoolPlan) -> Any:
    """Return what ``create_memory_pool_configurator`` returns, for a pool of this plan; imports SGLang."""
    from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig, MemoryPoolConfigurator

    class KvcqPoolConfigurator(MemoryPoolConfigurator):  # type: ignore[misc, unused-ignore]
        """Sizes a pool of 2-bit pages."""

        def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> Any:
            """Return the tokens that fit into the bytes that are left."""
            check_page(page_size)
            return MemoryPoolConfig(max_total_num_tokens=plan.tokens(available_bytes))

        def calculate_pool_sizes_from_max_tokens(self, max_total_num_tokens: int, page_size: int) -> Any:
            """Return a number of tokens that was asked for, in whole pages."""
            check_page(page_size)
            return MemoryPoolConfig(max_total_num_tokens=max_total_num_tokens // PAGE * PAGE)

    return KvcqPoolConfigurator()


def check_page(page_size: int) -> None:
    """Check a page size.

    Raises:
        MismatchError: it is not 64.
    """
    if page_size != PAGE:
        raise MismatchError(f"pages of {page_size} tokens", where="--page-size", fix=f"use {PAGE}")
