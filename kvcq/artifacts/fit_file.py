"""``fit/``: the plan of every layer and the tensors that are served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvcq.artifacts.expected import check_windows
from kvcq.artifacts.integrity import Files, open_files
from kvcq.artifacts.kinds import MANIFESTS, require_kind
from kvcq.artifacts.layout import MAX_HEADER, data_bytes
from kvcq.artifacts.seal import decode, encode, seal
from kvcq.artifacts.semantics import check_index, check_values
from kvcq.artifacts.store import Staging
from kvcq.artifacts.tensor_file import TensorFile, parse_tensors
from kvcq.artifacts.tensors import tensor_index, tensors_digest, write_tensors
from kvcq.errors import CorruptArtifactError, InputError
from kvcq.spec.files import FileEntry, TensorEntry
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.header import FitHeader
from kvcq.spec.plan import LayerPlan

MANIFEST = MANIFESTS["fit"]
TENSORS = "tensors.safetensors"


@dataclass(frozen=True)
class FitArtifact:
    """A fit as read: served tensors as numpy arrays by name; `data` is the tensor file as it is on disk."""

    header: FitHeader
    tensors: dict[str, np.ndarray]
    data: memoryview


def write_fit(out: Path, header: FitHeader, tensors: Mapping[str, np.ndarray], force: bool = False) -> FitHeader:
    """Check the tensors against the plan, write a fit folder and return its header, sealed.

    Raises:
        InputError: the tensors do not fit the plan or are not finite; the output exists and `force` is off.
        ResourceError: the disk is full.
    """
    index = tensor_index(tensors)
    try:
        check_windows(header.plan, header.recipe.windows, str(out))
        check_index(index, header.plan, header.geometry, str(out))
        check_values(header.plan, tensors, str(out))
    except CorruptArtifactError as error:
        raise InputError(f"the fit is unusable: {error.what}", where=out, fix="nothing was written") from error
    header = header.model_copy(update={"tensors": index, "tensors_digest": tensors_digest(index, tensors)})
    with Staging(out, force=force) as stage:
        files = (write_tensors(stage, TENSORS, tensors),)
        header = seal(header.model_copy(update={"files": files}))
        stage.write(MANIFEST, [encode(header)])
    return header


def read_fit(path: Path) -> FitArtifact:
    """Read and check a fit folder.

    Raises:
        CorruptArtifactError: anything altered, truncated, missing, unlisted, or tensors that do not fit the plan.
        MismatchError: another format version.
    """
    files = open_files(path)
    require_kind(set(files.sizes), "fit", path)
    return load_fit(files)


def load_fit(files: Files) -> FitArtifact:
    """Read and check a fit whose files are listed already."""
    where = str(files.path / MANIFEST)
    header = decode(files.load(MANIFEST), FitHeader, where)
    if [entry.name for entry in header.files] != [TENSORS]:
        raise CorruptArtifactError(f"the header does not list {TENSORS}", where=where)
    check_windows(header.plan, header.recipe.windows, where)
    check_promise(header.tensors, header.plan, header.geometry, header.files[0], where)
    data = files.load_checked(header.files, unsealed=frozenset({MANIFEST}))[TENSORS]
    file = parse_tensors(data, str(files.path / TENSORS))
    return FitArtifact(header, check_served(file, header.tensors, header.tensors_digest, header.plan, where), data)


def check_promise(
    index: tuple[TensorEntry, ...], plan: tuple[LayerPlan, ...], geometry: ModelGeometry, file: FileEntry, where: str
) -> None:
    """Check, before any tensor is read, that index and file size are what plan and geometry call for.

    Raises:
        CorruptArtifactError: another set of tensors, or a file size that they cannot have.
    """
    check_index(index, plan, geometry, where)
    size = data_bytes(index)
    if not size < file.size <= size + MAX_HEADER:
        raise CorruptArtifactError(f"{file.name} has {file.size} bytes for {size} bytes of tensors", where=where)


def check_served(
    file: TensorFile, index: tuple[TensorEntry, ...], digest: str, plan: tuple[LayerPlan, ...], where: str
) -> dict[str, np.ndarray]:
    """Return the tensors of a file after checking index, digest and values.

    Raises:
        CorruptArtifactError: the file holds other tensors than the index, or values that the plan cannot use.
    """
    if file.index() != index:
        raise CorruptArtifactError("the tensor file differs from the tensor index", where=where)
    if file.digest() != digest:
        raise CorruptArtifactError("tensors digest does not match", where=where)
    tensors = file.arrays()
    check_values(plan, tensors, where)
    return tensors
