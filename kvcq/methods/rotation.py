"""Orthogonal rotations and the moments they are fitted to (OSCAR, arXiv 2605.17757). Everything in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcq.errors import InputError
from kvcq.stats.view import LayerStats
from kvcq.transforms.hadamard import hadamard
from kvcq.transforms.spectral import Ablation, compose_oscar, eigh_sorted
from kvcq.transforms.threads import single_threaded

# Sum of logit energies below which the release stops normalising them.
ENERGY_FLOOR = 1e-12


class SignDraw(NamedTuple):
    """Which signs the eigenvectors of a layer take: draw 0 is the rule of `transforms`, others are random.

    `side` is 0 for keys and 1 for values: their draws are independent.
    """

    draw: int = 0
    seed: int = 0
    layer: int = 0
    side: int = 0

    def signs(self, heads: int, d: int) -> Tensor | None:
        """Return +-1 ``[heads, d]`` float64, or None for the rule."""
        if self.draw == 0:
            return None
        key = int(np.random.SeedSequence([self.seed, self.draw, self.layer, self.side]).generate_state(1)[0])
        coins = torch.randint(0, 2, (heads, d), generator=torch.Generator().manual_seed(key))
        return 2.0 * coins.double() - 1.0


def walsh(heads: int, d: int) -> Tensor:
    """Return the Hadamard rotation of every head, ``[heads, d, d]`` float64."""
    return hadamard(d).expand(heads, d, d)


def oscar_rotation(
    moment: Tensor, *, shared: bool = False, signs: SignDraw | None = None, ablate: Ablation = "none"
) -> Tensor:
    """Return ``R = U H P`` of each KV head, ``[H, d, d]`` float64.

    Args:
        moment: Uncentred second moments ``[H, d, d]``; U are their eigenvectors, eigenvalues ascending.
        shared: Average the moments over the heads and give all heads one rotation (OSCAR's v1 files).
        signs: Signs of the eigenvectors; the sign rule by default.
        ablate: Factor of the composition to leave out.
    """
    heads, d, _ = moment.shape
    with single_threaded():
        target = moment.mean(0, keepdim=True) if shared else moment
        _, vectors = eigh_sorted(target)
        rotation = compose_oscar(vectors, signs.signs(target.shape[0], d) if signs is not None else None, ablate)
    return rotation.expand(heads, d, d)


def key_moment(stats: LayerStats, target: str, *, centred: bool = False) -> Tensor:
    """Return what key rotations are fitted to, ``[H, d_k, d_k]`` float64: C_Q for ``query``, E[k'k] for ``key``.

    With `centred` the latter is the moment of ``k - mu``, which is what is coded then; C_Q has no such form.
    """
    if target == "query":
        return stats.moments["q_second"]
    return stats.k_cov if centred else stats.moments["k_second"]


def value_moment(
    stats: LayerStats, target: str, *, centred: bool = False
) -> tuple[Tensor, dict[str, tuple[float, ...]]]:
    """Return C_S ``[H, d_v, d_v]`` float64 and a note of how many sampled rows stand behind it.

    Args:
        stats: The layer.
        target: ``logit_energy``, ``attention_output`` or ``value``, the unweighted E[v'v].
        centred: Take the logit energies of ``k - mu`` and the moment of ``v - nu``.

    Raises:
        InputError: logit energies without sampled rows.
    """
    if target == "attention_output":
        return stats.moments["o_second"], {}
    if target == "value":
        return stats.v_cov if centred else stats.moments["v_second"], {}
    keys, values = stats.k_rows.double(), stats.v_rows.double()
    if keys.shape[1] == 0:
        raise InputError(
            f"layer {stats.geometry.layer} has no sampled rows for logit energies",
            where="stats",
            fix="collect with --rows, or use value_target=attention_output",
        )
    if centred:
        keys = keys - stats.moments["k_mean"].unsqueeze(1)
        values = values - stats.moments["v_mean"].unsqueeze(1)
    moment, _ = logit_energy(keys, values, stats.moments["q_second"])
    return moment, {"value_rows": (float(keys.shape[1]),)}


def logit_energy(keys: Tensor, values: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Return OSCAR's released C_S and its weights: ``C_S = V' diag(w) V / n`` with ``w_t = k_t C_Q k_t'`` of mean 1.

    w is the mean squared logit of a key over the query pool: no softmax, no mask. The paper's C_S is E[o'o] instead.

    Args:
        keys: ``[H, n, d_k]`` float64.
        values: ``[H, n, d_v]`` float64, aligned with `keys`.
        queries: C_Q ``[H, d_k, d_k]``.

    Returns:
        C_S ``[H, d_v, d_v]`` and w ``[H, n]``, float64.
    """
    with single_threaded():
        energy = ((keys @ queries) * keys).sum(-1)
        weights = energy * energy.shape[1] / energy.sum(-1, keepdim=True).clamp(min=ENERGY_FLOOR)
        moment = values.mT @ (values * weights.unsqueeze(-1)) / energy.shape[1]
    return moment, weights


def offsets(stats: LayerStats) -> dict[str, np.ndarray]:
    """Return mu = E k and nu = E v by role, ``[H, d]`` float32."""
    return {"k.offset": served(stats.moments["k_mean"]), "v.offset": served(stats.moments["v_mean"])}


def served(tensor: Tensor) -> np.ndarray:
    """Return a tensor as the contiguous float32 array that an artifact stores."""
    return np.ascontiguousarray(tensor.to(torch.float32).numpy())
