"""``.NAME.checkpoint/``: the sums and rows of a collection that is still running, beside its output NAME."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvcq.artifacts.claim import check_target, claim, located, remove, restore, sibling
from kvcq.artifacts.disk import disk_errors
from kvcq.artifacts.integrity import open_files
from kvcq.artifacts.kinds import CHECKPOINT
from kvcq.artifacts.seal import decode, encode, seal
from kvcq.artifacts.stats_file import MOMENTS, SAMPLES
from kvcq.artifacts.store import Staging
from kvcq.artifacts.tensor_file import TensorFile, parse_tensors
from kvcq.artifacts.tensors import Array, write_tensors
from kvcq.errors import CorruptArtifactError
from kvcq.spec.checkpoint import CheckpointHeader


@dataclass(frozen=True)
class CheckpointFile:
    """A checkpoint as read, in the same arrays as statistics."""

    header: CheckpointHeader
    moments: dict[str, np.ndarray]
    sample_file: TensorFile

    @property
    def samples(self) -> dict[str, Any]:
        """Sampled rows as torch tensors in the model's dtype, by tensor name; imports torch."""
        return self.sample_file.torch_tensors()


def checkpoint_path(out: Path) -> Path:
    """Return where the checkpoint of an output stands, after bringing back one that was just being replaced."""
    path = sibling(located(out), "checkpoint")
    restore(path)
    return path


def write_checkpoint(
    path: Path, header: CheckpointHeader, moments: Mapping[str, Array], samples: Mapping[str, Array]
) -> None:
    """Write a checkpoint; an older one stays until the new one is complete on disk.

    Raises:
        ResourceError: the disk is full.
        InputError: the folder may not be written.
    """
    with Staging(path, force=True) as stage:
        files = (write_tensors(stage, MOMENTS, moments), write_tensors(stage, SAMPLES, samples))
        header = header.model_copy(update={"files": files, "planned": seal(header.planned)})
        stage.write(CHECKPOINT, [encode(seal(header))])


def read_checkpoint(path: Path) -> CheckpointFile:
    """Read and check a checkpoint.

    Raises:
        CorruptArtifactError: anything altered, truncated, missing or unlisted.
        MismatchError: another format version.
    """
    try:
        files = open_files(path)
        header = decode(files.load(CHECKPOINT), CheckpointHeader, str(path / CHECKPOINT))
        if {entry.name for entry in header.files} != {MOMENTS, SAMPLES}:
            raise CorruptArtifactError(f"the header does not list {MOMENTS} and {SAMPLES}", where=path)
        data = files.load_checked(header.files, unsealed=frozenset({CHECKPOINT}))
        moments, samples = (parse_tensors(data[name], str(path / name)) for name in (MOMENTS, SAMPLES))
    except CorruptArtifactError as error:
        raise CorruptArtifactError(error.what, where=error.where, fix="discard the checkpoint: --force") from error
    return CheckpointFile(header, moments.arrays(), samples)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint: it is renamed first, so that half of one never stands under its name.

    Raises:
        InputError: what stands there is no checkpoint, or may not be removed.
    """
    if not path.exists():
        return
    check_target(path, force=True)
    with claim(path), disk_errors(path):
        trash = sibling(path, "staging")
        path.rename(trash)
        remove(trash)
