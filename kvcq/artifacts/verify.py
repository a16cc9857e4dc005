"""One door to artifacts of any kind: detect, read with every check, verify."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcq.artifacts.bundle import Bundle, load_bundle
from kvcq.artifacts.fit_file import FitArtifact, load_fit
from kvcq.artifacts.integrity import open_files
from kvcq.artifacts.kinds import AGAIN, MANIFESTS, Kind, kind_of
from kvcq.artifacts.report_file import ReportArtifact, load_report
from kvcq.artifacts.scores_file import ScoresArtifact, load_scores
from kvcq.artifacts.stats_file import StatsArtifact, load_stats
from kvcq.errors import CorruptArtifactError

Artifact = StatsArtifact | FitArtifact | ReportArtifact | Bundle | ScoresArtifact


@dataclass(frozen=True)
class Intact:
    """An artifact that passed every check.

    Attributes:
        kind: What it is.
        digest: SHA-256 of its canonical header without that field.
        tensors_digest: Digest of the served tensors (fit and bundle).
        files: Number of files, the manifest included.
        size: Their bytes together.
        archive: True for a single file.
    """

    kind: Kind
    digest: str
    tensors_digest: str | None
    files: int
    size: int
    archive: bool


def detect(path: Path) -> Kind:
    """Return the kind of the artifact at a path, folder or archive, by its file names.

    Raises:
        InputError: nothing there, or not an artifact.
        CorruptArtifactError: an artifact without its manifest, or a broken archive.
    """
    return kind_of(set(open_files(Path(path)).sizes), Path(path))


def read_any(path: Path) -> Artifact:
    """Read an artifact of any kind with every check that needs no model; never imports torch.

    Raises:
        InputError: nothing there, or not an artifact.
        CorruptArtifactError: a flipped byte, a truncated, missing or unlisted file, or meaningless content.
        MismatchError: another format version.
    """
    return _read(Path(path))[0]


def verify(path: Path) -> Intact:
    """Check an artifact of any kind; see `read_any` for what is raised."""
    return _read(Path(path))[1]


def _read(path: Path) -> tuple[Artifact, Intact]:
    files = open_files(path)
    kind = kind_of(set(files.sizes), path)
    if files.archive and kind != "bundle":
        raise CorruptArtifactError(f"an archive without {MANIFESTS['bundle']}", where=path, fix=AGAIN)
    artifact: Artifact
    tensors = None
    if kind == "stats":
        artifact = load_stats(files)
        digest = artifact.digest
    elif kind == "fit":
        artifact = load_fit(files)
        digest, tensors = artifact.header.digest, artifact.header.tensors_digest
    elif kind == "report":
        artifact = load_report(files)
        digest = artifact.report.digest
    elif kind == "scores":
        artifact = load_scores(files)
        digest = artifact.report.digest
    else:
        artifact = load_bundle(files)
        digest, tensors = artifact.manifest.digest, artifact.manifest.tensors_digest
    return artifact, Intact(kind, digest, tensors, len(files.sizes), sum(files.sizes.values()), files.archive)
