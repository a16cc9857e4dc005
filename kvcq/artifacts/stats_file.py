"""``stats/``: the header, the exact sums, and the sampled rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvcq.artifacts.integrity import Files, open_files
from kvcq.artifacts.kinds import MANIFESTS, require_kind
from kvcq.artifacts.seal import decode, encode, seal
from kvcq.artifacts.semantics import check_finite
from kvcq.artifacts.stats_semantics import check_stats
from kvcq.artifacts.store import Staging
from kvcq.artifacts.tensor_file import TensorFile, parse_tensors
from kvcq.artifacts.tensors import Array, write_tensors
from kvcq.errors import CorruptArtifactError
from kvcq.spec.header import StatsHeader

MANIFEST = MANIFESTS["stats"]
MOMENTS, SAMPLES = "moments.safetensors", "samples.safetensors"


@dataclass(frozen=True)
class StatsArtifact:
    """Statistics as read: `moments` are numpy arrays (int64 limbs, float32 extrema), by tensor name."""

    header: StatsHeader
    moments: dict[str, np.ndarray]
    sample_file: TensorFile

    @property
    def digest(self) -> str:
        """The digest that a fit records as `stats_digest`."""
        return self.header.digest

    @property
    def samples(self) -> dict[str, Any]:
        """Sampled rows as torch tensors in the model's dtype, by tensor name; imports torch."""
        return self.sample_file.torch_tensors()


def write_stats(
    out: Path,
    header: StatsHeader,
    moments: Mapping[str, Array],
    samples: Mapping[str, Array],
    force: bool = False,
) -> StatsHeader:
    """Write a stats folder and return its header, sealed.

    Raises:
        InputError: the output exists and `force` is off, or may not be written.
        ResourceError: the disk is full.
    """
    with Staging(out, force=force) as stage:
        files = (write_tensors(stage, MOMENTS, moments), write_tensors(stage, SAMPLES, samples))
        header = seal(header.model_copy(update={"files": files}))
        stage.write(MANIFEST, [encode(header)])
    return header


def read_stats(path: Path) -> StatsArtifact:
    """Read and check a stats folder.

    Raises:
        CorruptArtifactError: anything altered, truncated, missing or unlisted, tensors of unknown layers, NaN.
        MismatchError: another format version.
    """
    files = open_files(path)
    require_kind(set(files.sizes), "stats", path)
    return load_stats(files)


def read_stats_header(path: Path) -> StatsHeader:
    """Read the header of a stats folder alone; its arrays are neither read nor checked.

    Raises:
        CorruptArtifactError: the header is altered, truncated or missing.
        MismatchError: another format version.
    """
    return decode(open_files(path).load(MANIFEST), StatsHeader, str(Path(path) / MANIFEST))


def load_stats(files: Files) -> StatsArtifact:
    """Read and check statistics whose files are listed already."""
    where = str(files.path / MANIFEST)
    header = decode(files.load(MANIFEST), StatsHeader, where)
    if {entry.name for entry in header.files} != {MOMENTS, SAMPLES}:
        raise CorruptArtifactError(f"the header does not list {MOMENTS} and {SAMPLES}", where=where)
    data = files.load_checked(header.files, unsealed=frozenset({MANIFEST}))
    moments = parse_tensors(data[MOMENTS], str(files.path / MOMENTS))
    samples = parse_tensors(data[SAMPLES], str(files.path / SAMPLES))
    check_stats(header, moments, samples, where)
    for file, name in ((moments, MOMENTS), (samples, SAMPLES)):
        for tensor in file.entries:
            # A shard that holds nothing but the probe has no extrema yet.
            if header.tokens or not tensor.endswith(("_min", "_max")):
                check_finite({tensor: file.as_numpy(tensor)}, str(files.path / name))
    return StatsArtifact(header, moments.arrays(), samples)
