"""What a decode step consists of, read from a trace that SGLang's torch profiler has written."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcq.errors import EvaluationError

GEMM, ATTENTION, QUANTIZE, OTHER = "gemm", "attention", "quantize", "other"
CLASSES = (GEMM, ATTENTION, QUANTIZE, OTHER)
# Names under which kvcq's own kernels appear; `quantize` is everything that writes the cache.
OWN = {
    "decode": ATTENTION,
    "decode_kernel": ATTENTION,
    "extend_kernel": ATTENTION,
    "halve_kernel": ATTENTION,
    "join_kernel": ATTENTION,
    "mix_kernel": ATTENTION,
    "rotate_kernel": ATTENTION,
    "_plan": ATTENTION,
    "_map": ATTENTION,
    "write_kernel": QUANTIZE,
    "write_uniform": QUANTIZE,
    "write_keys": QUANTIZE,
    "windows_kernel": QUANTIZE,
}
# Those of SGLang, FlashInfer and the libraries below them, in this order.
_PATTERNS = (
    (QUANTIZE, re.compile(r"store_?kv_?cache|set_kv_buffer|kv_cache_copy|reshape_and_cache", re.IGNORECASE)),
    (
        ATTENTION,
        re.compile(
            r"^_fwd_(grouped_)?kernel|fmha|flash_(fwd|attn)|attention|attn|BatchDecode|BatchPrefill|MergeStates"
            r"|kv_indices|num_kv_splits",
            re.IGNORECASE,
        ),
    ),
    (GEMM, re.compile(r"nvjet|gemm|gemv|cutlass|cublas|splitk|xmma|matmul", re.IGNORECASE)),
)
KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = "GraphLaunch"
SHOWN = 12


@dataclass(frozen=True)
class Split:
    """Microseconds of one decode step.

    Attributes:
        steps: Whole steps that were averaged.
        step: From the start of one to that of the next.
        classes: Busy time by class; where kernels overlap, time belongs to the one that began first.
        top: Busy time of the kernels that take most, with their calls a step.
    """

    steps: int
    step: float
    classes: dict[str, float]
    top: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def gap(self) -> float:
        """Time in which nothing runs."""
        return max(0.0, self.step - sum(self.classes.values()))


def classify(name: str) -> str:
    """Return the class of a kernel by its name."""
    plain = name.partition("(")[0].strip()
    if plain in OWN:
        return OWN[plain]
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), OTHER)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace, ``.json`` or ``.json.gz``.

    Raises:
        EvaluationError: not a whole trace: it may still be written.
    """
    try:
        data = path.read_bytes()
        plain = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        events = plain["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise EvaluationError(f"not a trace: {type(error).__name__}", where=path) from None
    if not isinstance(events, list):
        raise EvaluationError("not a trace: no events", where=path)
    return events


def split(events: Iterable[Mapping[str, Any]], asked: int) -> Split:
    """Average whole decode steps.

    A step begins where a kernel runs that every step has exactly once: the launches of graphs tell how many steps
    there are, so what lies before the first such kernel and behind the last is cut off with its unfinished steps.

    Args:
        events: Of the trace.
        asked: Steps that were to be traced, for a trace without launches.

    Raises:
        EvaluationError: no kernels, or no three steps of them.
    """
    kernels, launches = [], 0
    for event in events:
        if event.get("ph") != "X":
            continue
        if event.get("cat") in KINDS:
            kernels.append((float(event["ts"]), float(event["dur"]), str(event["name"])))
        elif LAUNCH in str(event.get("name")):
            launches += 1
    kernels.sort()
    # More launches than steps: each is told twice, by the runtime and by the driver.
    marks = _marks(kernels, launches if 0 < launches <= asked + 1 else asked)
    first, last, steps = marks[0], marks[-1], len(marks) - 1
    busy: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    covered = 0.0
    for start, duration, name in kernels:
        # Launches may overlap, one waiting for the other: what an earlier one covers is its time.
        own = max(0.0, start + duration - max(start, covered))
        covered = max(covered, start + duration)
        if first <= start < last:
            busy[name] += own / steps
            calls[name] += 1
    classes = dict.fromkeys(CLASSES, 0.0)
    for name, duration in busy.items():
        classes[classify(name)] += duration
    most = sorted(busy, key=lambda name: -busy[name])[:SHOWN]
    return Split(steps, (last - first) / steps, classes, [(name, busy[name], calls[name] / steps) for name in most])


def _marks(kernels: Sequence[tuple[float, float, str]], wanted: int) -> list[float]:
    """Return where steps begin: the starts of a kernel that runs once a step."""
    counts = Counter(name for _, _, name in kernels)
    if not counts:
        raise EvaluationError("the trace has no kernels", where="profiler", fix="see whether CUPTI can trace here")
    # Of those that run once a step the first in time; a step more or less may have been cut in two.
    near = sorted({count for count in counts.values() if abs(count - wanted) <= 1}, key=lambda n: (abs(n - wanted), -n))
    names = {name for name, count in counts.items() if near and count == near[0]}
    name = next((name for _, _, name in kernels if name in names), None)
    marks = [start for start, _, other in kernels if other == name]
    if name is None or len(marks) < 3:
        raise EvaluationError(f"about {wanted} steps in the trace, no kernel runs once in each", where="profiler")
    return marks
