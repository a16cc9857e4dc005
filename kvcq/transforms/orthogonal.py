"""Rotations that see no data: drawn from a seed."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcq.transforms.threads import single_threaded


def random_rotation(d: int, seed: int) -> Tensor:
    """Return a Haar-distributed orthogonal matrix [d, d], float64: the Q of a seeded Gaussian, R with diag(R) > 0."""
    gaussian = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with single_threaded():
        q, r = torch.linalg.qr(gaussian)
    # Householder QR leaves the signs of R open; fixing them makes Q unique, and uniform over all rotations.
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)
