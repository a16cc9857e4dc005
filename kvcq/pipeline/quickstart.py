"""quickstart: the whole chain on a real small model, with the time of every stage."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvcq.artifacts.verify import verify
from kvcq.errors import EvaluationError, InputError
from kvcq.pipeline.collect import collect
from kvcq.pipeline.fit import fit
from kvcq.pipeline.pack import pack
from kvcq.pipeline.progress import SILENT, Reporter
from kvcq.pipeline.requests import CollectRequest, FitRequest, PackRequest, QuickstartRequest, ValidateRequest
from kvcq.pipeline.result import aligned
from kvcq.pipeline.validate import ValidateResult, validate

CALIBRATION = "builtin:pydoc-topics"
HELD_OUT = "builtin:stdlib"
CONTEXT = 2048
TOKENS = 6 * CONTEXT
ROWS = 4096
ITERATIONS = 8
PASSAGES = 2
METHODS = ("naive-int2", "quarot-int2", "oscar", "oscar-centered", "nova")
PACKED = "nova"


@dataclass(frozen=True)
class QuickstartResult:
    """Everything that quickstart made, and the seconds of each stage."""

    bundle: Path
    digest: str
    validated: ValidateResult
    seconds: dict[str, float]
    model: str

    def text(self) -> str:
        """Return what stands below the report: the bundle, the times, and where the numbers come from."""
        rows = [(stage, f"{seconds:6.1f} s") for stage, seconds in self.seconds.items()]
        rows.append(("total", f"{sum(self.seconds.values()):6.1f} s"))
        return "\n".join(
            [
                f"report: {self.validated.path}/report.html",
                f"only {PACKED} has a canary in this report; to pack another, validate it again",
                f"bundle: {self.bundle} (verified, digest {self.digest[:16]})",
                f"try it: kvcq serve {self.bundle} --model {self.model}   (needs pip install 'kvcq[serve]')",
                "",
                *aligned(rows),
                "",
                f"Python {platform.python_version()}: the texts are this version's own documentation and sources, "
                "so numbers differ a little between versions.",
                f"calibrated on {CALIBRATION}, measured on {HELD_OUT}; preset for speed: {TOKENS} tokens, {ROWS} rows, "
                f"{ITERATIONS} k-means iterations.",
            ]
        )

    def payload(self) -> dict[str, Any]:
        """Return paths, digests, times and the mean KL of each method for machines."""
        kl = {row.name: row.contexts[-1].metrics.kl for row in self.validated.report.artifacts}
        return {
            "bundle": str(self.bundle),
            "digest": self.digest,
            "report": str(self.validated.path),
            "python": platform.python_version(),
            "seconds": self.seconds,
            "kl": kl,
        }


class _Clock:
    """Seconds by stage, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def mark(self, stage: str) -> None:
        now = time.monotonic()
        self.seconds[stage] = round(now - self._last, 1)
        self._last = now


def quickstart(request: QuickstartRequest, reporter: Reporter = SILENT) -> QuickstartResult:
    """Collect, fit five methods, validate them side by side, pack and verify the best.

    Raises:
        InputError: the output folder exists and `force` is off.
    """
    out = request.out
    if out.exists() and not request.force:
        raise InputError("the output exists", where=out, fix="choose another --out, or --force to replace it")
    clock = _Clock()
    collect(
        CollectRequest(
            model=request.model,
            data=(CALIBRATION,),
            out=out / "stats",
            num_tokens=TOKENS,
            seq_len=CONTEXT,
            rows=ROWS,
            checkpoint_every=None,
            force=request.force,
        ),
        reporter,
    )
    clock.mark("collect")
    fits = []
    for method in METHODS:
        settings = (f"iterations={ITERATIONS}", f"rows={ROWS}") if method == "nova" else ()
        made = FitRequest(
            stats=out / "stats", out=out / "fits" / method, method=method, settings=settings, force=request.force
        )
        fit(made, reporter)
        fits.append(made.out)
    clock.mark("fit")
    validated = validate(
        ValidateRequest(
            artifacts=tuple(fits),
            model=request.model,
            data=(HELD_OUT,),
            out=out / "report",
            contexts=(CONTEXT // 2, CONTEXT),
            passages=PASSAGES,
            canary=(PACKED,),
            force=request.force,
        ),
        reporter,
    )
    clock.mark("validate")
    bundle = out / f"{Path(request.model).name}-{PACKED}.kvcq"
    pack(PackRequest(fit=out / "fits" / PACKED, report=out / "report", out=bundle, force=request.force), reporter)
    clock.mark("pack")
    digest = verify(bundle).digest
    clock.mark("verify")
    return QuickstartResult(bundle, digest, validated, clock.seconds, request.model)


def check_order(result: QuickstartResult) -> None:
    """Refuse to call a run good in which a better method measured worse.

    Raises:
        EvaluationError: names the first pair that is out of order.
    """
    kl = result.payload()["kl"]
    for worse, better in pairwise(METHODS):
        if kl[better] >= kl[worse]:
            raise EvaluationError(
                f"{better} has KL {kl[better]:.4g}, not below {worse} with {kl[worse]:.4g}",
                where=str(result.validated.path),
                fix="this is unexpected on the default model: report it with the output of kvcq env",
            )
