"""The five kinds of artifact, the files that make each of them, and how a path is recognised."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from kvcq.errors import CorruptArtifactError, InputError
from kvcq.spec import canonical

Kind = Literal["stats", "fit", "report", "bundle", "scores"]

MIB = 1 << 20

# The bundle comes first: it contains a report.json of its own.
MANIFESTS: dict[Kind, str] = {
    "bundle": "kvcq.json",
    "stats": "stats.json",
    "fit": "fit.json",
    "report": "report.json",
    "scores": "scores.json",
}

FILES: dict[Kind, frozenset[str]] = {
    "bundle": frozenset({"kvcq.safetensors", "report.json", "README.md", "canary.safetensors"}),
    "stats": frozenset({"moments.safetensors", "samples.safetensors"}),
    "fit": frozenset({"tensors.safetensors"}),
    "report": frozenset({"report.html", "run.json"}),
    "scores": frozenset({"answers.jsonl", "scores.html", "run.json"}),
}

# The manifest of an interrupted collection, which is no artifact: no step accepts it in place of one.
CHECKPOINT = "checkpoint.json"

# A file that only one kind has: without the manifest next to it the artifact is incomplete.
TELLTALES = {
    "kvcq.safetensors": "bundle",
    "moments.safetensors": "stats",
    "tensors.safetensors": "fit",
    "answers.jsonl": "scores",
}

SIZE_CAPS = {
    ".json": canonical.MAX_BYTES,
    ".md": 4 * MIB,
    ".html": 64 * MIB,
    ".jsonl": 4096 * MIB,
    ".safetensors": 65536 * MIB,
}

AGAIN = "copy or download it again, or run the step that wrote it again"


def size_cap(name: str) -> int:
    """Return the largest size in bytes that a file of this name may have."""
    return SIZE_CAPS.get(Path(name).suffix, MIB)


def require_kind(names: set[str], wanted: Kind, where: Path) -> None:
    """Tell an artifact of another kind apart from a damaged one.

    Raises:
        InputError: another kind's manifest is there, and the wanted one's is not.
    """
    if MANIFESTS[wanted] in names:
        return
    for kind, manifest in MANIFESTS.items():
        if manifest in names:
            raise InputError(f"this is a {kind} folder, not {wanted}", where=where, fix=f"give the {wanted} folder")


def kind_of(names: set[str], where: Path) -> Kind:
    """Recognise the kind of an artifact by its file names.

    Raises:
        CorruptArtifactError: files of an artifact without its manifest.
        InputError: no artifact at all.
    """
    for name, kind in TELLTALES.items():
        manifest = MANIFESTS[kind]  # type: ignore[index]
        if name in names and manifest not in names:
            raise CorruptArtifactError(f"incomplete {kind}: {manifest} is missing", where=where, fix=AGAIN)
    for known, manifest in MANIFESTS.items():
        if manifest in names:
            return known
    wanted = ", ".join(MANIFESTS.values())
    raise InputError("not a kvcq artifact", where=where, fix=f"give a folder with one of {wanted}, or a .kvcq archive")
