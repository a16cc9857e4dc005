"""``report/``: report.json with its page and canaries, and run.json with what must not be sealed (times, paths)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import JsonValue

from kvcq.artifacts.integrity import Files, open_files
from kvcq.artifacts.kinds import MANIFESTS, require_kind
from kvcq.artifacts.seal import decode, encode, seal
from kvcq.artifacts.semantics import check_finite
from kvcq.artifacts.store import Staging
from kvcq.artifacts.tensor_file import parse_tensors
from kvcq.artifacts.tensors import Array, tensor_chunks, write_tensors
from kvcq.errors import CorruptArtifactError, InputError
from kvcq.spec.base import SpecModel
from kvcq.spec.files import FileEntry, Sha256
from kvcq.spec.report import Report

MANIFEST = MANIFESTS["report"]
PAGE, RUN = "report.html", "run.json"


class RunInfo(SpecModel):
    """``run.json``: facts of one run that differ from machine to machine; sealed by itself, not by the report."""

    format: Literal["kvcq.run"] = "kvcq.run"
    version: Literal[1] = 1
    info: dict[str, JsonValue]
    digest: Sha256 = ""


@dataclass(frozen=True)
class ReportArtifact:
    """A report as read: the page, the canaries by file name, and their bytes and those of report.json."""

    report: Report
    page: str
    canaries: dict[str, dict[str, np.ndarray]]
    run: dict[str, JsonValue]
    data: dict[str, memoryview]


def canary_entry(name: str, arrays: Mapping[str, Array]) -> FileEntry:
    """Return the entry of a canary file before it is written: what `CanarySummary.file` holds."""
    data = b"".join(tensor_chunks(arrays))
    return FileEntry(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def write_report(
    out: Path,
    report: Report,
    html: str,
    canaries: Mapping[str, Mapping[str, Array]],
    run_info: Mapping[str, JsonValue],
    force: bool = False,
) -> Report:
    """Write a report folder and return the report, sealed.

    Args:
        out: Folder to create.
        report: The measurements; `CanarySummary.file` of each row is `canary_entry` of its canary.
        html: The page.
        canaries: Canary arrays by file name, e.g. ``canary-0.safetensors``.
        run_info: JSON values for run.json: times, paths, host.
        force: Replace an existing artifact.

    Raises:
        InputError: canaries and report rows differ; the output exists and `force` is off.
        ResourceError: the disk is full.
    """
    with Staging(out, force=force) as stage:
        files = [write_tensors(stage, name, canaries[name]) for name in sorted(canaries)]
        files.append(stage.write(PAGE, [html.encode("utf-8")]))
        report = seal(report.model_copy(update={"files": tuple(files)}))
        try:
            _check_rows(report, str(out))
        except CorruptArtifactError as error:
            raise InputError(error.what, where=out, fix="nothing was written") from error
        stage.write(RUN, [encode(seal(RunInfo(info=dict(run_info))))])
        stage.write(MANIFEST, [encode(report)])
    return report


def read_report(path: Path) -> ReportArtifact:
    """Read and check a report folder.

    Raises:
        CorruptArtifactError: anything altered, truncated, missing or unlisted.
        MismatchError: another format version.
    """
    files = open_files(path)
    require_kind(set(files.sizes), "report", path)
    return load_report(files)


def load_report(files: Files) -> ReportArtifact:
    """Read and check a report whose files are listed already."""
    where = str(files.path / MANIFEST)
    own = files.load(MANIFEST)
    report = decode(own, Report, where)
    _check_rows(report, where)
    data = files.load_checked(report.files, unsealed=frozenset({MANIFEST, RUN}))
    run = decode(files.load(RUN), RunInfo, str(files.path / RUN))
    canaries = {}
    for name in sorted(set(data) - {PAGE}):
        canaries[name] = read_canary(data[name], str(files.path / name))
    return ReportArtifact(report, text(data[PAGE], files.path / PAGE), canaries, run.info, {MANIFEST: own, **data})


def read_canary(data: memoryview, where: str) -> dict[str, np.ndarray]:
    """Return the arrays of a canary file, finite.

    Raises:
        CorruptArtifactError: not canonical safetensors, or NaN.
    """
    arrays = parse_tensors(data, where).arrays()
    check_finite(arrays, where)
    return arrays


def text(data: memoryview, path: Path) -> str:
    """Decode UTF-8 text.

    Raises:
        CorruptArtifactError: not UTF-8.
    """
    try:
        return bytes(data).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptArtifactError("not UTF-8 text", where=path) from error


def _check_rows(report: Report, where: str) -> None:
    """Check that files are the page and the rows' canaries, and that row names are unique."""
    names = [row.name for row in report.artifacts]
    if len(set(names)) != len(names):
        raise CorruptArtifactError("two artifacts of the report have the same name", where=where)
    canaries = {row.canary.file for row in report.artifacts if row.canary is not None}
    listed = {entry for entry in report.files if entry.name != PAGE}
    if listed != canaries or len(report.files) != len(listed) + 1:
        raise CorruptArtifactError("the files of the report are not its page and its canaries", where=where)
