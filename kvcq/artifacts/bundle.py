"""``NAME.kvcq``: fit and report sealed into one portable artifact, a folder or a single file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvcq.artifacts import report_file
from kvcq.artifacts.archive import archive_chunks
from kvcq.artifacts.expected import check_windows
from kvcq.artifacts.fit_file import FitArtifact, check_promise, check_served
from kvcq.artifacts.integrity import Files, open_files
from kvcq.artifacts.kinds import FILES, MANIFESTS, require_kind
from kvcq.artifacts.report_file import ReportArtifact, read_canary, text
from kvcq.artifacts.seal import decode, encode, seal
from kvcq.artifacts.store import Staging
from kvcq.artifacts.tensor_file import parse_tensors
from kvcq.errors import CorruptArtifactError, InputError, MismatchError
from kvcq.spec.files import FileEntry
from kvcq.spec.header import FitHeader
from kvcq.spec.manifest import Manifest, ValidationSummary
from kvcq.spec.plan import plan_digest
from kvcq.spec.report import ArtifactReport, Report
from kvcq.version import __version__

MANIFEST = MANIFESTS["bundle"]
TENSORS, REPORT, CARD, CANARY = "kvcq.safetensors", "report.json", "README.md", "canary.safetensors"


@dataclass(frozen=True)
class Bundle:
    """A bundle as opened, every check passed.

    Attributes:
        manifest: What was sealed.
        tensors: Served tensors as numpy arrays, by name.
        report: The report they were validated with; `row` is theirs.
        canary: Canary arrays, by name.
        card: Text of README.md.
        archive: True when read from a single file.
    """

    manifest: Manifest
    tensors: dict[str, np.ndarray]
    report: Report
    row: ArtifactReport
    canary: dict[str, np.ndarray]
    card: str
    archive: bool


def draft_manifest(fit: FitArtifact, report: ReportArtifact) -> Manifest:
    """Compose the manifest of a bundle, without files and digest, for the card to be written from.

    Raises:
        MismatchError: the report has no row for exactly these tensors, windows and model.
        InputError: the row has no canary or no storage arithmetic.
    """
    header, found = fit.header, report.report
    if found.identity != header.identity:
        raise MismatchError("report and fit are of different models", fix="validate this fit and pack again")
    row = find_row(found, header)
    if row is None:
        raise MismatchError("the report does not cover this fit", fix="validate this fit and pack again")
    if row.canary is None or row.constants_bytes is None:
        raise InputError(
            f"the report has no canary of {row.name}", where="--report", fix="validate it again, without --no-canary"
        )
    return Manifest(
        kvcq=__version__,
        recipe=header.recipe,
        stats_digest=header.stats_digest,
        identity=header.identity,
        provenance=header.provenance,
        geometry=header.geometry,
        calibration=header.calibration,
        collected_context=header.collected_context,
        target_context=header.target_context,
        plan=header.plan,
        tensors=header.tensors,
        tensors_digest=header.tensors_digest,
        bits=row.storage,
        constants_bytes=row.constants_bytes,
        folds=row.folds,
        validation=_validation(found, row, hashlib.sha256(report.data[report_file.MANIFEST]).hexdigest()),
    )


def write_bundle(
    out: Path,
    manifest: Manifest,
    fit: FitArtifact,
    report: ReportArtifact,
    card: str,
    *,
    archive: bool = False,
    force: bool = False,
) -> Manifest:
    """Write a bundle and return its manifest, sealed; same inputs, same bytes.

    Args:
        out: Folder to create, or the file with `archive`.
        manifest: From `draft_manifest` of this fit and report.
        fit: The fit; its tensor file is copied byte for byte.
        report: The report; report.json and the row's canary are copied byte for byte.
        card: Text of README.md.
        archive: Write a single file.
        force: Replace an existing artifact.

    Raises:
        InputError: the output exists and `force` is off, or may not be written.
        ResourceError: the disk is full.
    """
    row = find_row(report.report, manifest)
    if row is None or row.canary is None:
        raise MismatchError("the report does not cover this fit", fix="validate this fit and pack again")
    members: dict[str, bytes | memoryview] = {
        TENSORS: fit.data,
        REPORT: report.data[report_file.MANIFEST],
        CARD: card.encode("utf-8"),
        CANARY: report.data[row.canary.file.name],
    }
    entries = tuple(
        FileEntry(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in sorted(members.items())
    )
    manifest = seal(manifest.model_copy(update={"files": entries}))
    with Staging(out, force=force, single_file=archive) as stage:
        if archive:
            stage.stream(stage.name, archive_chunks({**members, MANIFEST: encode(manifest)}))
        else:
            for name, data in members.items():
                stage.write(name, [data])
            stage.write(MANIFEST, [encode(manifest)])
    return manifest


def open_bundle(path: Path) -> Bundle:
    """Open a bundle, folder or archive, after every check that needs no model.

    Raises:
        CorruptArtifactError: anything altered, truncated, missing, unlisted, or tensors that do not fit the plan.
        InputError: an artifact of another kind.
        MismatchError: another format version.
    """
    files = open_files(path)
    require_kind(set(files.sizes), "bundle", path)
    return load_bundle(files)


def load_bundle(files: Files) -> Bundle:
    """Open a bundle whose files are listed already."""
    where = str(files.path / MANIFEST)
    manifest = decode(files.load(MANIFEST), Manifest, where)
    entries = {entry.name: entry for entry in manifest.files}
    if list(entries) != sorted(FILES["bundle"]) or len(entries) != len(manifest.files):
        raise CorruptArtifactError("the manifest does not list the files of a bundle", where=where)
    check_windows(manifest.plan, manifest.recipe.windows, where)
    check_promise(manifest.tensors, manifest.plan, manifest.geometry, entries[TENSORS], where)
    data = files.load_checked(manifest.files, unsealed=frozenset({MANIFEST}))
    report = decode(data[REPORT], Report, str(files.path / REPORT))
    row = _bound_row(manifest, report, entries, where)
    file = parse_tensors(data[TENSORS], str(files.path / TENSORS))
    return Bundle(
        manifest=manifest,
        tensors=check_served(file, manifest.tensors, manifest.tensors_digest, manifest.plan, where),
        report=report,
        row=row,
        canary=read_canary(data[CANARY], str(files.path / CANARY)),
        card=text(data[CARD], files.path / CARD),
        archive=files.archive,
    )


def find_row(report: Report, header: FitHeader | Manifest) -> ArtifactReport | None:
    """Return the row that measured these tensors under this plan and these windows.

    The digest of the tensors alone is not enough: fits that differ in a clip or a window may share every tensor.
    Points of a sweep are no fits, so their rows are passed over.
    """
    wanted = (header.tensors_digest, plan_digest(header.plan), header.recipe.windows)
    points = set() if report.sweep is None else {point.artifact for point in report.sweep.points}
    found = (row for row in report.artifacts if (row.tensors_digest, row.plan_digest, row.windows) == wanted)
    return next((row for row in found if row.name not in points), None)


def _validation(report: Report, row: ArtifactReport, sha256: str) -> ValidationSummary:
    gates = tuple(gate for gate in report.gates if gate.artifact == row.name)
    return ValidationSummary(report_sha256=sha256, contexts=row.contexts, gates=gates)


def _bound_row(manifest: Manifest, report: Report, entries: dict[str, FileEntry], where: str) -> ArtifactReport:
    """Return the row of the report that measured these tensors, after comparing all that the manifest repeats."""
    row = find_row(report, manifest)
    if row is None or report.identity != manifest.identity:
        raise CorruptArtifactError("the report is not of these tensors", where=where)
    canary = None if row.canary is None else (row.canary.file.size, row.canary.file.sha256)
    if canary != (entries[CANARY].size, entries[CANARY].sha256):
        raise CorruptArtifactError("the canary is not the one that the report recorded", where=where)
    same = (
        manifest.validation == _validation(report, row, entries[REPORT].sha256)
        and manifest.folds == row.folds
        and manifest.bits == row.storage
        and manifest.constants_bytes == row.constants_bytes
    )
    if not same:
        raise CorruptArtifactError("the manifest's summary differs from the report", where=where)
    return row
