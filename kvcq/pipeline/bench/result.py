"""What was measured: rows, their record for machines and the tables for people."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from kvcq.errors import visible
from kvcq.pipeline.bench.shapes import Shape
from kvcq.pipeline.bench.timing import Timing
from kvcq.pipeline.requests import BOUND_GBS

TITLES = {
    "decode": "Decode attention, one token a request, windows included",
    "step": "Beside attention, a decode step maps its queries in every layer and plans once",
    "append": "Write of one decode step; compared with BF16 decode attention of the same step",
    "prefill": "Write of a chunk; compared with BF16 causal attention of the same chunk",
    "extend": "Attention of a chunk of new tokens",
    "peer": "Foreign kernels",
}
COLUMNS = (
    "shape", "codec", "kernel", "us", "spread, us", "GB/s", "% of read ceiling", "% of bound", "BF16 / this",
    "relative error",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One kernel at one shape.

    Attributes:
        op: ``decode``, ``step``, ``append``, ``prefill``, ``extend`` or ``peer``.
        shape: What was computed.
        codec: ``bf16`` for baselines.
        kernel: Backend or library; ``, folded`` when the inverse rotation of the values is left to the caller.
        timing: None when it was not timed.
        bytes: Bytes that a layer must read, where that is what bounds it.
        bf16_us: Time of the best BF16 kernel at the shape.
        error: Relative error against float64 of what was checked, ``|o - ref| / |ref|``.
        problem: Why there is no time.
        wrong: The problem is that the kernel is wrong or failed.
    """

    op: str
    shape: Shape
    codec: str
    kernel: str
    timing: Timing | None = None
    bytes: int | None = None
    bf16_us: float | None = None
    error: float | None = None
    problem: str | None = None
    wrong: bool = False

    @property
    def rate(self) -> float | None:
        """GB/s of the bytes that must be read."""
        return None if self.timing is None or self.bytes is None else self.bytes / self.timing.us / 1000

    @property
    def ratio(self) -> float | None:
        """How many times faster than the best BF16 kernel."""
        return None if self.timing is None or self.bf16_us is None else self.bf16_us / self.timing.us

    def line(self) -> str:
        """Return the row in one line."""
        figure = self.problem if self.timing is None else f"{self.timing.us:.1f} us"
        error = "" if self.error is None or self.problem else f", error {self.error:.1e}"
        return f"{self.op} {self.shape.label} {self.codec} {self.kernel}: {figure}{error}"


@dataclass(frozen=True)
class Check:
    """One kernel over one ragged batch.

    Attributes:
        case: What was computed, in words.
        kernel: Backend.
        error: Relative error against float64, None where there is none or it is not finite.
        limit: What it may be at most.
        problem: What is wrong; None: it is right.
        seconds: That it took, compilation included.
        missing: Why it was not run; None: it was.
    """

    case: str
    kernel: str
    error: float | None
    limit: float
    problem: str | None = None
    seconds: float = 0.0
    missing: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the kernel ran and is right."""
        return self.problem is None and self.missing is None

    def line(self) -> str:
        """Return the check in one line."""
        error = "" if self.error is None else f"error {self.error:.1e}"
        missing = None if self.missing is None else f"not run: {self.missing}"
        return f"{self.case}, {self.kernel}: {self.problem or missing or error}"


@dataclass
class BenchResult:
    """Rows of one run on one device.

    Attributes:
        device: Name, versions and settings, in words.
        ceiling: Best measured rate of a read-only kernel, GB/s; None when it was not measured.
        rates: The rate of each of its block shapes.
        rows: In the order of measuring.
        choices: What serving would choose, by codec and shape.
        seconds: Of the whole run.
        plan: Lines of a dry run, instead of all that.
        checks: Of ragged batches, before anything was timed.
    """

    device: dict[str, str] = field(default_factory=dict)
    ceiling: float | None = None
    rates: list[float] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    choices: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    plan: list[str] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def wrong(self) -> list[Row]:
        """Rows of kernels that are wrong or failed."""
        return [row for row in self.rows if row.wrong]

    @property
    def problems(self) -> list[str]:
        """A line for each check that is not right, then for each kernel that is wrong or failed."""
        return [check.line() for check in self.checks if check.problem is not None] + [row.line() for row in self.wrong]

    @property
    def checks_run(self) -> str:
        """How many checks were run, in words."""
        return f"{sum(check.missing is None for check in self.checks)} of {len(self.checks)} run"

    def text(self) -> str:
        """Return Markdown: the device, a table for each operation, and what was not timed."""
        if self.plan:
            return "\n".join(self.plan)
        lines = [f"{', '.join(f'{name} {value}' for name, value in self.device.items())}.", ""]
        if self.ceiling is not None:
            rates = ", ".join(f"{rate:.0f}" for rate in self.rates)
            lines += [f"Read ceiling, measured: {self.ceiling:.0f} GB/s ({rates}). Bound: {BOUND_GBS:.0f} GB/s.", ""]
        if self.checks:
            lines += [f"Checks of ragged batches, {self.checks_run}:", "", *check_table(self.checks), ""]
        for op, title in TITLES.items():
            rows = [row for row in self.rows if row.op == op]
            if rows:
                lines += [f"{title}:", "", *table(rows, self.ceiling), ""]
        lines += [f"- {label}: {choice}" for label, choice in self.choices.items()]
        lines += [f"- wrong: {visible(check.line())}" for check in self.checks if check.problem is not None]
        lines += [f"- {visible(check.line())}" for check in self.checks if check.missing is not None]
        lines += [f"- not timed: {visible(row.line())}" for row in self.rows if row.problem]
        return "\n".join([*lines, f"- {self.seconds:.0f} s in all"])

    def payload(self) -> dict[str, Any]:
        """Return the record for machines."""
        if self.plan:
            return {"kind": "bench", "plan": self.plan}
        return {
            "kind": "bench",
            "device": self.device,
            "read_ceiling_gbs": self.ceiling,
            "read_rates_gbs": self.rates,
            "bound_gbs": BOUND_GBS,
            "checks": [asdict(check) | {"ok": check.ok} for check in self.checks],
            "rows": [self._record(row) for row in self.rows],
            "choices": self.choices,
            "seconds": self.seconds,
        }

    def _record(self, row: Row) -> dict[str, Any]:
        record = {"label": row.shape.label, **asdict(row.shape), **asdict(row)}
        timing = record.pop("timing") or dict.fromkeys(("us", "low", "high", "calls"))
        del record["shape"]
        of_ceiling, of_bound = shares(row, self.ceiling)
        rates = {"gbs": row.rate, "of_ceiling": of_ceiling, "of_bound": of_bound, "bf16_ratio": row.ratio}
        return {**record, **timing, **rates}


def shares(row: Row, ceiling: float | None) -> tuple[float | None, float | None]:
    """Return the rate of a row as a share of the measured ceiling and of the bound."""
    if row.rate is None:
        return None, None
    return None if ceiling is None else row.rate / ceiling, row.rate / BOUND_GBS


def check_table(checks: Iterable[Check]) -> list[str]:
    """Return a Markdown table of checks."""
    lines = ["| case | kernel | relative error | limit | ok |", "|---|---|---|---|---|"]
    for check in checks:
        error = "" if check.error is None else f"{check.error:.1e}"
        ok = "yes" if check.ok else "no" if check.missing is None else "not run"
        lines.append(f"| {check.case} | {check.kernel} | {error} | {check.limit:g} | {ok} |")
    return lines


def table(rows: Iterable[Row], ceiling: float | None) -> list[str]:
    """Return a Markdown table of timed and wrong rows; columns that no row fills are left out."""
    cells = [_cells(row, ceiling) for row in rows if row.timing is not None or row.wrong]
    kept = [i for i in range(len(COLUMNS)) if any(line[i] for line in cells)]
    head = [COLUMNS[i] for i in kept]
    lines = [head, ["---"] * len(head), *([line[i] for i in kept] for line in cells)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _cells(row: Row, ceiling: float | None) -> list[str]:
    timing, (of_ceiling, of_bound) = row.timing, shares(row, ceiling)
    return [
        row.shape.label,
        row.codec,
        row.kernel,
        "wrong" if timing is None else _figure(timing.us),
        "" if timing is None else f"{_figure(timing.low)} .. {_figure(timing.high)}",
        "" if row.rate is None else f"{row.rate:.0f}",
        "" if of_ceiling is None else f"{100 * of_ceiling:.0f}",
        "" if of_bound is None else f"{100 * of_bound:.0f}",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if row.error is None else f"{row.error:.1e}",
    ]


def _figure(us: float) -> str:
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 1000 else f"{us:.0f}"
