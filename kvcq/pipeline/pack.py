"""pack: seal a fit and its report into a bundle. Computes nothing new."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcq.artifacts.bundle import draft_manifest, find_row, write_bundle
from kvcq.artifacts.fit_file import FitArtifact, read_fit
from kvcq.artifacts.report_file import read_report
from kvcq.errors import InputError
from kvcq.pipeline.output import exclusive
from kvcq.pipeline.progress import SILENT, Reporter
from kvcq.pipeline.requests import PackRequest
from kvcq.pipeline.result import aligned
from kvcq.reports.card import bundle_card
from kvcq.spec.manifest import Manifest


@dataclass(frozen=True)
class PackResult:
    """The bundle and its manifest; `path` is None after a dry run."""

    path: Path | None
    manifest: Manifest

    def text(self) -> str:
        """Return the result for people."""
        manifest = self.manifest
        rows = [
            ("bundle", str(self.path) if self.path else "dry run, nothing written"),
            ("method", manifest.recipe.method),
            ("bits", ", ".join(f"{entry.total:.2f} at {entry.context}" for entry in manifest.bits)),
            ("tensors", manifest.tensors_digest),
        ]
        if self.path:
            rows.append(("digest", manifest.digest))
        return "\n".join(aligned(rows))

    def payload(self) -> dict[str, Any]:
        """Return the result for machines."""
        return {
            "path": str(self.path) if self.path else None,
            "digest": self.manifest.digest or None,
            "tensors_digest": self.manifest.tensors_digest,
            "bits": {str(entry.context): entry.total for entry in self.manifest.bits},
        }


@exclusive
def pack(request: PackRequest, reporter: Reporter = SILENT) -> PackResult:
    """Seal a bundle; the same fit and report give the same bytes.

    Raises:
        InputError: a fit that quantizes nothing or is for accuracy only; an output without the suffix .kvcq, or one
            that exists.
        MismatchError: the report did not measure these tensors.
        CorruptArtifactError: a damaged fit or report.
    """
    if request.out.suffix != ".kvcq":
        raise InputError(f"{request.out.name} does not end in .kvcq", where="--out", fix="name it NAME.kvcq")
    reporter.stage("checking fit and report")
    fit, report = read_fit(request.fit), read_report(request.report)
    if not any(entry.quantized for entry in fit.header.plan):
        raise InputError(
            "this fit quantizes no layer: there is nothing to serve", where=request.fit, fix="fit a method"
        )
    check_served(fit, request.fit)
    manifest = draft_manifest(fit, report)
    if report.report.provenance.weights != fit.header.provenance.weights:
        measured, fitted = report.report.provenance.source, fit.header.provenance.source
        reporter.warn(f"the report was measured on {measured}, the fit was made on {fitted}: other weights")
    for gate in manifest.validation.gates:
        if not gate.passed:
            reporter.warn(f"gate failed, and the bundle says so: {gate.metric} {gate.value:.4g} at {gate.context}")
    if request.dry_run:
        return PackResult(None, manifest)
    reporter.stage(f"writing {request.out.name}")
    card = bundle_card(manifest, find_row(report.report, fit.header), report.report.command)
    manifest = write_bundle(request.out, manifest, fit, report, card, archive=request.archive, force=request.force)
    return PackResult(request.out, manifest)


def check_served(fit: FitArtifact, where: Path) -> None:
    """Refuse codecs that exist for comparison only: no kernel reads them.

    Raises:
        InputError: names the first layer and why no page holds its codes.
    """
    for entry in fit.header.plan:
        for side, codec in (("K", entry.k), ("V", entry.v)):
            if codec is not None and not codec.served:
                raise InputError(
                    f"layer {entry.layer}'s {side} codec is for accuracy only: {codec.unserved}",
                    where=where,
                    fix="fit a method and parameters that kvcq methods calls served",
                )
