"""What was measured: rows, their record for machines and the tables for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvcq.errors import visible
from kvcq.pipeline.bench_serve.rows import Row
from kvcq.pipeline.bench_serve.trace import CLASSES
from kvcq.reports.text import number

BF16 = "bf16-"
TITLES = {
    "decode": "Decoding, while all requests run",
    "prefill": "Prefill, every prompt computed",
    "hits": "Prefix hits, each request behind a prefix of its own; tokens/s of the whole run",
    "job": "Jobs, however many requests run at once",
    "split": "One decode step, microseconds by the profiler",
}
Column = tuple[str, Callable[[Row], float | str | None]]
_CELL: tuple[Column, ...] = (("cell", lambda row: row.cell), ("arm", lambda row: row.arm))
_STEP: tuple[Column, ...] = (
    ("running", lambda row: row.running and str(row.running)),
    ("tokens/s", lambda row: row.tokens_per_s),
    ("step, ms", lambda row: row.step_ms),
    ("bound, ms", lambda row: row.bound_ms),
    ("bound / step", lambda row: bound_share(row)),
    ("window, s", lambda row: row.window_s),
)
_ITL: tuple[Column, ...] = (("ITL, ms", lambda row: row.itl_ms), ("p99", lambda row: row.itl_p99_ms))
_TTFT: tuple[Column, ...] = (("TTFT, ms", lambda row: row.ttft_ms), ("p99", lambda row: row.ttft_p99_ms))
COLUMNS: dict[str, tuple[Column, ...]] = {
    "decode": (*_CELL, *_STEP, *_ITL, *_TTFT),
    "prefill": (*_CELL, ("prompt tokens/s", lambda row: row.prefill_per_s), *_TTFT),
    "hits": (*_CELL, ("found", lambda row: row.hit_share), ("tokens/s", lambda row: row.tokens_per_s), *_TTFT, *_ITL),
    "job": (
        *_CELL,
        ("wall, s", lambda row: row.wall_s),
        ("at once", lambda row: row.running and str(row.running)),
        ("tokens/s", lambda row: row.tokens_per_s),
        ("step, ms", lambda row: row.step_ms),
        ("window, s", lambda row: row.window_s),
    ),
    "split": (
        *_CELL,
        ("running", lambda row: row.running and str(row.running)),
        ("step", lambda row: None if row.step_ms is None else 1000 * row.step_ms),
        *((name, lambda row, name=name: (row.classes_us or {}).get(name)) for name in CLASSES),
        ("idle", lambda row: row.gap_us),
    ),
}


@dataclass(frozen=True)
class ArmRecord:
    """What the server of an arm said, or why there is none.

    Attributes:
        name: ``bf16-triton`` or the name of a bundle.
        backend: SGLang's attention backend.
        capacity: Tokens of its pool.
        most: Requests that it runs at once.
        cell: Bytes of a token in its pages, all ranks; None where not known.
        record: What it said of itself.
        problem: Why it did not start, or ended before its cells did.
    """

    name: str
    backend: str
    capacity: int | None = None
    most: int | None = None
    cell: int | None = None
    record: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None


@dataclass
class ServeBenchResult:
    """Rows of one run on one machine.

    Attributes:
        machine: Device and versions, in words.
        model: What was served, and what was scaled down.
        settings: The options that figures depend on.
        arms: In the order in which they ran.
        rows: In the order of measuring.
        seconds: Of the whole run.
        problems: What could not be kept, and why.
        plan: Lines of a dry run, instead of all that.
    """

    machine: dict[str, str] = field(default_factory=dict)
    model: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    arms: list[ArmRecord] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    plan: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        """What has no figure, or is not kept, in one line each."""
        arms = [f"{arm.name}: {arm.problem}" for arm in self.arms if arm.problem is not None]
        return arms + [row.line() for row in self.rows if row.problem and value(row) is None] + self.problems

    def same(self, row: Row) -> list[Row]:
        """Return the rows of every arm in the cell of a row; of a split, those with as many requests in every step."""
        there = [other for other in self.rows if (other.kind, other.cell) == (row.kind, row.cell)]
        if row.kind == "split":
            return [other for other in there if row.running is not None and other.running == row.running]
        return there

    def ratio(self, row: Row, against: str | None = None) -> float | None:
        """Return how many times better a row is than BF16.

        Args:
            row: Of any arm.
            against: Arm that it is compared with; None: the best of BF16 in its cell.
        """
        others = [r for r in self.same(row) if (r.arm == against if against else r.arm.startswith(BF16))]
        values = [found for other in others if (found := value(other)) is not None]
        own = value(row)
        return None if own is None or not values else own / max(values)

    def expected(self, row: Row) -> float | None:
        """Return the step of a split, in ms, if nothing but attention differed from BF16: see `benchmarks/serve.py`.

        That is the step of the fastest BF16 arm in the cell, with its attention replaced by this row's.
        """
        plain = [r for r in self.same(row) if r.arm.startswith(BF16) and r.step_ms is not None and r.classes_us]
        if row.classes_us is None or not plain:
            return None
        best = min(plain, key=lambda other: other.step_ms or 0.0)
        if best.step_ms is None or best.classes_us is None:
            return None
        return best.step_ms + (row.classes_us["attention"] - best.classes_us["attention"]) / 1000

    def text(self) -> str:
        """Return Markdown: machine, arms, a table for each kind of cell, and what needs a word."""
        if self.plan:
            return "\n".join(self.plan)
        lines = [f"{', '.join(f'{name} {text}' for name, text in self.machine.items())}.", f"{self.model}.", ""]
        lines += [*self._capacity(), ""]
        for kind, title in TITLES.items():
            rows = [row for row in self.rows if row.kind == kind]
            if rows:
                lines += [f"{title}:", "", *self._table(kind, rows), ""]
        lines += [f"- {visible(f'{arm.name}: {arm.problem}')}" for arm in self.arms if arm.problem]
        lines += [f"- {visible(row.line())}" for row in self.rows if row.problem]
        lines += [f"- {visible(problem)}" for problem in self.problems]
        return "\n".join([*lines, f"- {self.seconds:.0f} s in all"])

    def payload(self) -> dict[str, Any]:
        """Return the record for machines."""
        if self.plan:
            return {"kind": "bench-serve", "plan": self.plan}
        return {
            "kind": "bench-serve",
            "machine": self.machine,
            "model": self.model,
            "settings": self.settings,
            "arms": [asdict(arm) for arm in self.arms],
            "rows": [
                {**asdict(row), "bf16_ratio": self.ratio(row), "expected_ms": self.expected(row)} for row in self.rows
            ],
            "problems": self.problems,
            "seconds": self.seconds,
        }

    def _capacity(self) -> list[str]:
        best = max((arm.capacity or 0 for arm in self.arms if arm.name.startswith(BF16)), default=0)
        rows = [
            [arm.name, arm.capacity, arm.cell, arm.most, f"{arm.capacity / best:.2f}" if arm.capacity and best else ""]
            for arm in self.arms
            if arm.problem is None
        ]
        head = ["arm", "tokens of the pool", "bytes a token", "requests at once, most", "pool / BF16"]
        return _markdown(head, [["" if cell is None else str(cell) for cell in row] for row in rows])

    def _table(self, kind: str, rows: Sequence[Row]) -> list[str]:
        columns: list[Column] = [*COLUMNS[kind], ("times BF16", self.ratio)]
        if kind == "split":
            columns.append(("step / expected", self._of_expected))
        order = list(dict.fromkeys(row.cell for row in rows))
        rows = sorted(rows, key=lambda row: order.index(row.cell))
        shown = [[_cell(read(row)) for _, read in columns] for row in rows if value(row) is not None]
        kept = [i for i in range(len(columns)) if any(line[i] for line in shown)]
        return _markdown([columns[i][0] for i in kept], [[line[i] for i in kept] for line in shown])

    def _of_expected(self, row: Row) -> float | None:
        expected = None if row.arm.startswith(BF16) else self.expected(row)
        return None if expected is None or row.step_ms is None else row.step_ms / expected


def value(row: Row) -> float | None:
    """Return what rows of a kind are compared by, more is better."""
    if row.kind == "prefill":
        return row.prefill_per_s
    if row.kind == "job":
        return None if row.wall_s is None else 1 / row.wall_s
    if row.kind == "split":
        return None if row.step_ms is None else 1 / row.step_ms
    return row.tokens_per_s


def bound_share(row: Row) -> float | None:
    """Return how much of a step is the time that its bytes need."""
    return None if row.bound_ms is None or row.step_ms is None else row.bound_ms / row.step_ms


def _cell(found: float | str | None) -> str:
    if found is None or isinstance(found, str):
        return found or ""
    return f"{found:.0f}" if abs(found) >= 1000 else number(found)


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]
