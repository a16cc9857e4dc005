"""What a scheduler tells of its own cache: to `kvcq serve`, which asks for proof, and to Prometheus.

Two ways out of the scheduler, both filled here:

* ``/server_info``: `report` is a hook behind ``Scheduler.get_internal_state`` and adds the key `KEY` to the state that
  SGLang sends. It is written by the process that attends, so that a server without the plugin cannot say it.
* ``/metrics``: with ``--enable-metrics`` SGLang collects from files that its processes share, so the gauges are plain
  ones that are set when something changes. `prometheus_client` chooses that way when it is imported, after SGLang has
  named the folder: it is imported with the first `Meters`.

The backend's factory calls `publish` once its pool is verified, and keeps the `Meters` that it returns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KEY = "kvcq"
RANK = "rank"
# The kernel that stands in where none of the bundle's runs.
FALLBACK = "torch"


@dataclass(frozen=True)
class Facts:
    """What does not change while a scheduler runs.

    Attributes:
        digest: Of the bundle that its tables were built from.
        method: That fitted it.
        kvcq: Version of kvcq in this process.
        sglang: Version of SGLang in this process.
        bytes_per_token: Bytes of one token in the pool's tensors, all layers, the KV heads of this rank.
        window_bytes: Bytes of the exact rows of one running request, on this rank.
        capacity: Tokens of the pool.
        running: Most requests that run at once: rows of the ring.
        sinks: Entries of the sink store.
        rank: Of tensor parallelism.
        ranks: How many there are.
        kernels: What attends, by layer, e.g. ``cuda``; ``torch`` is a fallback.
    """

    digest: str
    method: str
    kvcq: str
    sglang: str
    bytes_per_token: int
    window_bytes: int
    capacity: int
    running: int
    sinks: int
    rank: int
    ranks: int
    kernels: dict[int, str]


@dataclass
class Meters:
    """Counts of one scheduler, and the gauges that show them.

    Attributes:
        facts: What was published.
        rings: Requests that hold a row of the ring.
        pinned: Sink entries that copies to come name.
        cached: The others with sinks in them, which a prefix may find.
        fallbacks: By reason, attention that did not take the kernels of the bundle; stays empty.
        clamped: Values beyond the float16 range that were clamped, as last heard of from the device.
    """

    facts: Facts
    rings: int = 0
    pinned: int = 0
    cached: int = 0
    clamped: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    _gauges: dict[str, Any] = field(default_factory=dict, repr=False)

    def occupancy(self, rings: int, pinned: int, cached: int) -> None:
        """Tell how much of the exact rows is in use, when it changes."""
        self.rings, self.pinned, self.cached = rings, pinned, cached
        if self._gauges:
            for name, value in (("ring", rings), ("sink_pinned", pinned), ("sink_cached", cached)):
                self._gauges[name].set(value)

    def fallback(self, reason: str) -> None:
        """Count attention that did not take the kernels of the bundle."""
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
        if self._gauges:
            self._gauges["fallbacks"].labels(str(self.facts.rank), reason).inc()

    def clamp(self, total: int) -> None:
        """Tell how many values have been clamped since the start; late news do not lower it."""
        self.clamped = max(self.clamped, total)
        if self._gauges:
            self._gauges["clamped"].set(self.clamped)

    def plain(self) -> dict[str, Any]:
        """Return what `report` adds to the state of the scheduler: numbers, text, lists and dicts of text."""
        facts = dict(vars(self.facts))
        facts["kernels"] = {str(layer): name for layer, name in self.facts.kernels.items()}
        counts = {name: getattr(self, name) for name in ("rings", "pinned", "cached", "clamped")}
        return facts | counts | {"fallbacks": dict(self.fallbacks)}

    def export(self) -> None:
        """Create the gauges, in the registry that SGLang collects."""
        # Here, not at the top: the folder of the shared files must have been named before.
        from prometheus_client import Counter, Gauge

        rank = str(self.facts.rank)

        def gauge(name: str, text: str, value: float) -> Any:
            made = Gauge(name, text, (RANK,), multiprocess_mode="mostrecent").labels(rank)
            made.set(value)
            return made

        facts = self.facts
        info = Gauge("kvcq_bundle_info", "The bundle of the cache", ("digest", "method", RANK), multiprocess_mode="max")
        info.labels(facts.digest, facts.method, rank).set(1)
        gauge("kvcq_bytes_per_token", "Bytes that one more token adds to this rank's cache", facts.bytes_per_token)
        gauge("kvcq_capacity_tokens", "Tokens that the pool holds", facts.capacity)
        gauge("kvcq_window_bytes", "Bytes of exact rows of one request, on this rank", facts.window_bytes)
        gauge("kvcq_ring_rows", "Rows of the ring, one for each request at once", facts.running)
        gauge("kvcq_sink_entries", "Entries of the sink store", facts.sinks)
        self._gauges = {
            "ring": gauge("kvcq_ring_rows_used", "Rows of the ring that running requests hold", 0),
            "sink_pinned": gauge("kvcq_sink_entries_pinned", "Sink entries that copies to come name", 0),
            "sink_cached": gauge("kvcq_sink_entries_cached", "Other sink entries that a prefix may find", 0),
            "clamped": gauge("kvcq_clamped_values", "Values beyond the float16 range clamped, a request late", 0),
            "fallbacks": Counter("kvcq_fallbacks", "Attention without the bundle's kernels", (RANK, "reason")),
        }
        # A counter without a count is not shown at all, and absence proves nothing.
        self._gauges["fallbacks"].labels(rank, "none")


_published: list[Meters] = []


def publish(facts: Facts, *, metrics: bool) -> Meters:
    """Let this process say what it serves, once its pool and tables are verified.

    Args:
        facts: What it serves.
        metrics: SGLang collects metrics, ``server_args.enable_metrics``.

    Returns:
        Where counts go.
    """
    meters = Meters(facts)
    if metrics:
        meters.export()
    for layer, kernel in facts.kernels.items():
        if kernel.startswith(FALLBACK):
            meters.fallback(f"layer {layer}")
    _published[:] = [meters]
    return meters


def published() -> Meters | None:
    """Return what this process has published; None before `publish`."""
    return _published[0] if _published else None


def report(result: Any, *_: Any, **__: Any) -> Any:
    """Add the record to a scheduler's state: a hook after ``Scheduler.get_internal_state``.

    Args:
        result: A ``GetInternalStateReqOutput``, whose `internal_state` is a dict.

    Returns:
        The same object.
    """
    meters = published()
    if meters is not None:
        result.internal_state[KEY] = meters.plain()
    return result
