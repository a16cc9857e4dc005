"""The attention metric: coordinates in which a squared key error is the squared logit error."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcq.transforms.spectral import eigh_sorted


def unit_metric(moment: Tensor) -> Tensor:
    """Scale second moments [H, d, d] to unit mean eigenvalue, float64; an all-zero moment becomes the identity.

    Stored rows then keep the size of keys (no fp16 overflow); the inverse map carries the factor to the queries.
    """
    exact = moment.to(torch.float64)
    mean = exact.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(exact.shape[-1], dtype=torch.float64, device=exact.device)
    return torch.where(mean > 0, exact / torch.where(mean > 0, mean, torch.ones_like(mean)), eye)


def metric_pair(moment: Tensor, floor: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return M^(1/2) and M^(-1/2) [H, d, d], float64, eigenvalues raised to `floor` times the largest.

    Both roots use the raised eigenvalues, so they are exact inverses of each other.

    Raises:
        ValueError: a moment without a positive eigenvalue.
    """
    values, vectors = eigh_sorted(moment)
    largest = values[..., -1:]
    if bool((largest <= 0).any()):
        raise ValueError("a query moment has no positive eigenvalue")
    raised = torch.maximum(values, floor * largest).unsqueeze(-2)
    return (vectors * raised.sqrt()) @ vectors.mT, (vectors / raised.sqrt()) @ vectors.mT


def nova_transform(moment: Tensor, covariance: Tensor, floor: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """Return A, S, variances of NOVA-KV: A = M^(1/2) E, S = A^(-T) = M^(-1/2) E, all float64.

    E and the variances [H, d] (descending) are the eigenpairs of M^(1/2) C M^(1/2): columns of r = (k - mu) A are
    uncorrelated with these variances, A A^T = M, and |r - r_hat|^2 = (k - k_hat) M (k - k_hat)^T.

    Args:
        moment: Query second moment M [H, d, d].
        covariance: Centred key covariance C [H, d, d].
        floor: Relative eigenvalue floor of M.
    """
    root, inverse = metric_pair(moment, floor)
    variances, basis = eigh_sorted(root @ covariance.to(torch.float64) @ root, descending=True)
    return root @ basis, inverse @ basis, variances
