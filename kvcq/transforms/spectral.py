"""Eigenvectors with one answer: float64, one thread, fixed signs."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvcq.transforms.hadamard import hadamard
from kvcq.transforms.permutation import spread_order
from kvcq.transforms.threads import single_threaded

Ablation = Literal["none", "no-u", "no-h", "no-p"]

# Two magnitudes this close count as equal for the sign rule: rounding must not choose between them.
SIGN_TIE = 1e-9
RANK_FLOOR = 1e-12


def fix_signs(vectors: Tensor) -> Tensor:
    """Flip columns of [..., d, n] so that the component of largest magnitude is positive.

    Of components within a relative 1e-9 of the largest magnitude, the one with the lowest index decides.
    """
    size = vectors.abs()
    largest = size.amax(-2, keepdim=True)
    pivot = (size >= largest * (1.0 - SIGN_TIE)).to(torch.uint8).argmax(-2, keepdim=True)
    return torch.where(vectors.gather(-2, pivot) < 0, -vectors, vectors)


def eigh_sorted(matrix: Tensor, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Return eigenvalues [H, d] and eigenvectors [H, d, d] (columns) of symmetric matrices [H, d, d], in float64.

    The matrix is symmetrised first. Equal eigenvalues keep the order and the vectors of LAPACK's single-threaded
    solver; `descending` reverses the ascending order.
    """
    exact = matrix.to(torch.float64)
    with single_threaded():
        values, vectors = torch.linalg.eigh((exact + exact.mT) / 2)
    if descending:
        values, vectors = values.flip(-1), vectors.flip(-1)
    return values, fix_signs(vectors)


def effective_rank(matrix: Tensor) -> Tensor:
    """Return how many eigenvalues of symmetric matrices [H, d, d] stand above the noise, [H] int64.

    The floor is `RANK_FLOOR` of the largest: rows in float32 leave about 1e-14 in directions that they do not reach.
    """
    values, _ = eigh_sorted(matrix)
    return (values > values[..., -1:].clamp_min(0) * RANK_FLOOR).sum(-1)


def compose_oscar(vectors: Tensor, signs: Tensor | None = None, ablate: Ablation = "none") -> Tensor:
    """Return R = U diag(signs) H P [H, d, d] of OSCAR (`r_h_pbr`), float64 (arXiv 2605.17757).

    H flattens the second moment whose ascending eigenvectors are `vectors`: diag(R^T C R) = trace(C) / d when d
    is a power of two. P changes nothing while one scale covers the head.

    Args:
        vectors: U [H, d, d], columns in ascending order of eigenvalue.
        signs: +-1 for each eigenvector, broadcastable to [H, d]; none by default.
        ablate: Factor that is the identity, as in the paper's ablation (section 4); ``no-u`` keeps the signs.
    """
    exact = vectors.to(torch.float64)
    d = exact.shape[-1]
    if ablate == "no-u":
        exact = torch.eye(d, dtype=torch.float64, device=exact.device).expand_as(exact)
    if signs is not None:
        exact = exact * signs.to(torch.float64).unsqueeze(-2)
    if ablate != "no-h":
        exact = torch.matmul(exact, hadamard(d).to(exact.device))
    return exact if ablate == "no-p" else exact[..., spread_order(d).to(exact.device)]
