"""What hashes cannot prove: tensors that mean what the plan says, finite, invertible and consistent.

Every check reads plain numpy arrays, heads first; products are taken in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvcq.artifacts.expected import check_plan, expected_tensors
from kvcq.errors import CorruptArtifactError
from kvcq.spec.files import TensorEntry
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.plan import LayerPlan

ORTHOGONALITY = 1e-4
FP16_MAX = 65504.0

# |A'S| of the rounded factors differs from the identity by at most this share of |A|'|S|: float32 has 24 bits.
ROUNDING = 2.0**-22

# Multiplications that OpenBLAS does on one thread: its thread pool costs 100 times the work on a busy machine.
SERIAL_PRODUCT = 2**18


def check_index(index: Iterable[TensorEntry], plan: Sequence[LayerPlan], geometry: ModelGeometry, where: str) -> None:
    """Check that the index has exactly the tensors the plan calls for, in their shapes and dtypes.

    Raises:
        CorruptArtifactError: a missing, extra, misnamed or misshapen tensor, or an impossible plan.
    """
    check_plan(plan, geometry, where)
    expected = expected_tensors(plan, geometry)
    entries = list(index)
    found = {entry.name: entry for entry in entries}
    if [entry.name for entry in entries] != sorted(found):
        raise CorruptArtifactError("the tensor index is not sorted, or repeats a name", where=where)
    if extra := sorted(set(found) - set(expected)):
        raise CorruptArtifactError(f"tensor {extra[0]} is not called for by the plan", where=where)
    for name, wanted in expected.items():
        entry = found.get(name)
        if entry is None and not wanted.optional:
            raise CorruptArtifactError(f"tensor {name} is missing", where=where)
        if entry is not None and entry != wanted.entry:
            raise CorruptArtifactError(
                f"tensor {name} is {entry.dtype} {list(entry.shape)} with role {entry.role}, the plan calls for "
                f"{wanted.entry.dtype} {list(wanted.entry.shape)} with role {wanted.entry.role}",
                where=where,
            )


def check_values(plan: Sequence[LayerPlan], tensors: Mapping[str, np.ndarray], where: str) -> None:
    """Check the values of served tensors whose index has been checked.

    Raises:
        CorruptArtifactError: NaN or infinity, a rotation off by 1e-4, a metric transform whose query side is not
            its inverse transpose, a map or offset beyond fp16, a scale that is not positive, a codebook of equal
            words or unlike its float16 centroids.
    """
    check_finite(tensors, where)
    for layer in plan:
        for side, spec in (("k", layer.k), ("v", layer.v)):
            prefix = f"layers.{layer.layer}.{side}."
            if spec is None:
                continue
            if spec.transform != "identity":
                forward = tensors[prefix + "transform"]
                dual = tensors[prefix + "query"] if spec.transform == "metric" else forward
                _check_inverse(forward, dual, prefix + "transform", where)
            for role in ("transform", "offset", "levels", "bounds"):
                _check_range(tensors, prefix + role, where)
            for role in ("levels", "bounds"):
                if prefix + role in tensors:
                    _check_order(tensors[prefix + role], prefix + role, strict=role == "bounds", where=where)
            if spec.reordered:
                _check_permutation(tensors[prefix + "order"], prefix + "order", where)
            if spec.codebook is not None:
                _check_words(tensors[prefix + "codebook"], prefix, where)
            if spec.codebook == "int8":
                _check_codebook(tensors, prefix, where)


def check_finite(tensors: Mapping[str, np.ndarray], where: str) -> None:
    """Raise CorruptArtifactError naming the first tensor that holds NaN or infinity."""
    for name, array in tensors.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise CorruptArtifactError(f"tensor {name} has values that are not finite", where=where)


def _check_inverse(forward: np.ndarray, dual: np.ndarray, name: str, where: str) -> None:
    a, s = forward.astype(np.float64).swapaxes(-1, -2), dual.astype(np.float64)
    dim = a.shape[-1]
    step = max(2, SERIAL_PRODUCT // dim**2)
    for start in range(0, dim, step):
        columns = s[..., start : start + step]
        error = np.abs(a @ columns - np.eye(dim)[:, start : start + step])
        # A metric transform may be ill-conditioned; a rotation is not, and gets no such allowance.
        allowed = np.full_like(error, ORTHOGONALITY)
        if dual is not forward:
            allowed += ROUNDING * (np.abs(a) @ np.abs(columns))
        if (error > allowed).any():
            what = "is not orthogonal" if dual is forward else "is not inverted by its query side"
            raise CorruptArtifactError(f"tensor {name} {what}: off by {error.max():.2g}", where=where)


def _check_range(tensors: Mapping[str, np.ndarray], name: str, where: str) -> None:
    if name in tensors and np.abs(tensors[name]).max(initial=0.0) > FP16_MAX:
        raise CorruptArtifactError(f"tensor {name} has values beyond {FP16_MAX:g}, unfit for any row", where=where)


def _check_order(rising: np.ndarray, name: str, *, strict: bool, where: str) -> None:
    steps = np.diff(rising, axis=-1)
    if (steps <= 0).any() if strict else (steps < 0).any():
        raise CorruptArtifactError(f"tensor {name} does not rise along its last axis", where=where)


def _check_permutation(order: np.ndarray, name: str, where: str) -> None:
    if not np.array_equal(np.sort(order, axis=None), np.arange(order.size)):
        raise CorruptArtifactError(f"tensor {name} is no permutation of the channels of all heads", where=where)


def _check_words(words: np.ndarray, prefix: str, where: str) -> None:
    if ((words == words[..., :1, :]).all((-1, -2)) & words.any((-1, -2))).any():
        raise CorruptArtifactError(f"tensor {prefix}codebook has a group whose words are all equal", where=where)


def _check_codebook(tensors: Mapping[str, np.ndarray], prefix: str, where: str) -> None:
    words, scale = tensors[prefix + "codebook"], tensors[prefix + "codebook_scale"][..., None, None]
    raw = tensors[prefix + "codebook_fp16"].astype(np.float32)
    if not (scale > 0).all():
        raise CorruptArtifactError(f"tensor {prefix}codebook_scale has a scale that is not positive", where=where)
    # Snapping moves a word by half a step, float16 by 2^-11 of it (2^-25 for its subnormals).
    allowed = 0.51 * scale + 2.0**-10 * np.abs(raw) + 2.0**-24
    if (np.abs(words * scale - raw) > allowed).any():
        raise CorruptArtifactError(f"tensor {prefix}codebook differs from its float16 centroids", where=where)
