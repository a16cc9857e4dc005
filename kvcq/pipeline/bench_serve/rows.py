"""One measured figure with everything that it stands beside."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """One cell of one arm; times in seconds unless the name says more, None where not measured.

    Attributes:
        kind: ``decode``, ``prefill``, ``hits``, ``job`` or ``split``.
        arm: Name of the arm.
        cell: The cell as asked for; a prefix cell has the share of hits behind it.
        requests: Sent.
        input: Tokens of each prompt.
        output: Tokens that each generates.
        filled: The context was put there, not prefilled.
        running: Requests that decoded at once in the window, or in every step of a split; None where that varied.
        tokens_per_s: Decode throughput: of the window, or of the whole for hits and jobs.
        step_ms: From one token of a request to its next, in the window.
        window_s: Length of the window.
        ttft_ms, ttft_p99_ms: To the first token; only where the prompt was prefilled.
        itl_ms, itl_p99_ms: Between tokens.
        prefill_per_s: Prompt tokens computed in a second.
        wall_s: From sending to the last token.
        hit_share: Of prompt tokens, found in the cache.
        bound_ms: (weights + cache bytes) / bandwidth.
        classes_us: Busy time of a step by class, of a split.
        gap_us: Idle time of a step, likewise.
        steps: Steps that were averaged, likewise.
        top: Kernels that take most, likewise: name, us, calls a step.
        problem: Why there is no figure, or why it is not what it looks like.
    """

    kind: str
    arm: str
    cell: str
    requests: int
    input: int
    output: int
    filled: bool = False
    running: int | None = None
    tokens_per_s: float | None = None
    step_ms: float | None = None
    window_s: float | None = None
    ttft_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_ms: float | None = None
    itl_p99_ms: float | None = None
    prefill_per_s: float | None = None
    wall_s: float | None = None
    hit_share: float | None = None
    bound_ms: float | None = None
    classes_us: dict[str, float] | None = None
    gap_us: float | None = None
    steps: int | None = None
    top: list[tuple[str, float, float]] = field(default_factory=list)
    problem: str | None = None

    def line(self) -> str:
        """Return the row in one line."""
        figures = {
            "tok/s": self.tokens_per_s,
            "ms a step": self.step_ms,
            "ms to the first token": self.ttft_ms,
            "prompt tok/s": self.prefill_per_s,
            "s": self.wall_s if self.kind == "job" else None,
        }
        told = ", ".join(f"{value:.4g} {unit}" for unit, value in figures.items() if value is not None)
        problem = f" ({self.problem})" if self.problem else ""
        return f"{self.kind} {self.cell} {self.arm}: {told or 'no figure'}{problem}"
