"""How many tokens a server can hold in the memory that it is given, and the table that says so."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from kvcq.artifacts.bundle import Bundle
from kvcq.errors import InputError, visible
from kvcq.models.load import LoadedModel
from kvcq.pipeline.proof import Proof
from kvcq.pipeline.requests import ServeRequest
from kvcq.reports.text import plural, ranges, size
from kvcq.runtime.layout import PAGE, kv_bytes_per_token, window_bytes
from kvcq.spec.codec import CodecSpec
from kvcq.spec.manifest import Manifest
from kvcq.spec.plan import LayerPlan


@dataclass(frozen=True)
class Capacity:
    """What fits.

    Attributes:
        pages: Pages of 64 tokens for all running requests.
        context: Most tokens of one request.
        bytes_per_token: What one more token adds to the cache.
        bf16_bytes_per_token: What it adds to a BF16 cache.
        window_bytes: Exact rows of one running request.
        bf16_tokens: Tokens that a BF16 cache holds in the same memory.
    """

    pages: int
    context: int
    bytes_per_token: int
    bf16_bytes_per_token: int
    window_bytes: int
    bf16_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of all running requests together."""
        return self.pages * PAGE


def plan_capacity(request: ServeRequest, manifest: Manifest) -> Capacity:
    """Divide the memory: exact rows of every running request first, pages with the rest.

    Raises:
        InputError: the memory does not hold that, or a request of the wanted context.
    """
    # Whole numbers: pages hold every codec of a bundle.
    per_token = round(kv_bytes_per_token(manifest.plan, manifest.geometry))
    bf16 = round(kv_bytes_per_token((), manifest.geometry))
    windows = window_bytes(manifest.plan, manifest.geometry, manifest.recipe.windows)
    pages = (request.memory - request.max_running * windows) // (per_token * PAGE)
    if pages < 1:
        raise InputError(
            f"{size(request.memory)} do not hold the exact rows of {plural(request.max_running, 'request')}, "
            f"{size(windows)} each, and a page",
            where="--memory",
            fix="give more, or lower --max-running",
        )
    longest = manifest.geometry.max_positions
    if request.max_context is not None:
        if longest is not None and request.max_context > longest:
            raise InputError(
                f"the model's context is {longest} tokens, not {request.max_context}",
                where="--max-context",
                fix="use a shorter one",
            )
        if request.max_context > pages * PAGE:
            raise InputError(
                f"{size(request.memory)} hold {pages * PAGE} tokens, not {request.max_context}",
                where="--max-context",
                fix="use a shorter one, or give more --memory",
            )
    context = request.max_context or min(longest or pages * PAGE, pages * PAGE)
    return Capacity(pages, context, per_token, bf16, windows, request.memory // bf16)


def startup_lines(
    request: ServeRequest, bundle: Bundle, loaded: LoadedModel, capacity: Capacity, proof: Proof, kernels: str
) -> list[str]:
    """Return the table that a server prints before it is ready; `kernels` is what computes attention, and why."""
    manifest = bundle.manifest
    windows = manifest.recipe.windows
    rows = [
        ("bundle", f"{request.bundle.name}, {manifest.recipe.method}, digest {manifest.digest[:16]}"),
        ("model", f"{loaded.source.label}, {loaded.dtype_name} on {loaded.device}"),
        *(("layers", line) for line in layer_lines(manifest)),
        (
            "exact",
            f"the first {windows.sink} and the last {windows.recent} tokens, {size(capacity.window_bytes)} a request",
        ),
        (
            "cache",
            f"{capacity.bytes_per_token} bytes a token, {capacity.bf16_bytes_per_token} in BF16; "
            f"{proof.allocated} allocated for {proof.tokens} tokens, as computed",
        ),
        (
            "capacity",
            f"{capacity.tokens} tokens in {size(request.memory)}, {request.max_running} requests at once; "
            f"BF16 holds {capacity.bf16_tokens}",
        ),
        ("kernels", kernels),
        ("context", f"{capacity.context} tokens a request"),
        ("canary", f"{proof.statistic:.2f}, active"),
    ]
    return [f"{label}: {value}" for label, value in rows]


def layer_lines(manifest: Manifest) -> list[str]:
    """Describe layers by what becomes of them, those alike together."""
    kinds = {layer.layer: layer.kind for layer in manifest.geometry.layers}
    described = sorted((_codecs(entry), kinds[entry.layer], entry.layer) for entry in manifest.plan)
    lines = []
    for (codecs, kind), group in groupby(described, key=lambda item: item[:2]):
        numbers = [number for _, _, number in group]
        lines.append(f"{ranges(numbers)} ({kind}): {codecs}")
    return lines


def _codecs(entry: LayerPlan) -> str:
    if entry.k is None or entry.v is None:
        return f"BF16, {visible(entry.reason or '')}"
    return f"K {_codec(entry.k)}, V {_codec(entry.v)}"


def _codec(side: CodecSpec) -> str:
    return f"{side.quantizer} {side.bits} bit {side.transform}"
