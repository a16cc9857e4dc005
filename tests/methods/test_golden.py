"""The worked example of OSCAR and NOVA-KV (d = 8), through the code of the methods.

Eigenvectors follow the sign rule of `transforms`; the numbers were checked against both releases' fitters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcq.methods.base import FitContext
from kvcq.methods.oscar import Oscar
from kvcq.methods.product import key_map, normalised_groups
from kvcq.methods.rotation import logit_energy, oscar_rotation, value_moment
from kvcq.transforms.permutation import partition
from tests.methods.synthetic import golden_layer

STATS = golden_layer()
QUERIES = STATS.moments["q_second"]


def close(found: Tensor, expected: list[float], tolerance: float = 2e-8) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


def test_query_moment() -> None:
    first = [1.05078125, -0.04296875, -0.24804688, 0.13085938, -0.2265625, 0.17773438, 0.17578125, -0.41015625]
    close(QUERIES[0, 0], first)
    close(
        torch.linalg.eigvalsh(QUERIES[0]),
        [0.28790879, 0.47044081, 0.51785155, 0.66360716, 0.82999885, 1.04404687, 1.3926468, 1.76224916],
    )


def test_logit_energies_and_the_moment_of_values() -> None:
    moment, weights = logit_energy(STATS.k_rows.double(), STATS.v_rows.double(), QUERIES)
    close(weights[0, :6], [0.92955887, 0.70979643, 0.70481446, 1.18673052, 1.23232438, 0.5625616])
    close(weights.sum(1), [16.0])
    eigenvalues = [0.12095146, 0.25123897, 0.51476932, 0.71050862, 0.89436013, 1.12603952, 1.54830217, 2.02633114]
    close(torch.linalg.eigvalsh(moment[0]), eigenvalues)
    assert torch.equal(moment, value_moment(STATS, "logit_energy")[0])


def test_rotation() -> None:
    rotation = oscar_rotation(QUERIES)[0]
    first = [-0.73540233, -0.28454021, 0.21495535, -0.09769257, 0.43232785, -0.25016315, -0.10058484, 0.25072764]
    close(rotation[0], first)
    close(torch.diagonal(rotation.T @ QUERIES[0] @ rotation), [6.96875 / 8] * 8)
    served = Oscar().fit_layer(STATS, FitContext()).tensors["k.transform"]
    torch.testing.assert_close(torch.from_numpy(served[0]), rotation.float(), rtol=0, atol=0)


def test_metric_and_partition() -> None:
    moment = 2 * QUERIES  # summed over the two query heads, as NOVA-KV has it
    order = partition("deal", 8, 4)
    assert order.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    # The package scales M to unit mean eigenvalue: r shrinks by this factor and the query side grows by it.
    factor = float(torch.trace(moment[0]) / 8)
    mapped = key_map(moment, STATS.k_cov, 1e-6, order)
    variances = [5.34228779, 1.23361493, 0.70423045, 0.0527381, 1.89302797, 0.9449267, 0.35610203, 0.01063249]
    close(mapped.variances[0] * factor, variances)
    forward = mapped.transform[0] * factor**0.5
    first = [-1.09118171, 0.26342696, -0.15388866, -0.3930847, -0.50740967, -0.37495252, 0.46415298, 0.22316352]
    close(forward[0], first)
    torch.testing.assert_close(forward @ forward.T, moment[0], rtol=0, atol=1e-12)
    rows = (STATS.k_rows[0].double() - STATS.moments["k_mean"][0]) @ forward
    close(rows[0], [2.4532884, 1.59328500, 0.50091716, -0.13831079, -0.01849506, 1.17243664, -0.34027157, 0.09784266])
    close(rows.square().mean(1).sqrt()[:4], [1.13619632, 1.00075449, 0.87365121, 1.27798077])
    query = torch.tensor([1.25, 0, -1.25, 0.75, -0.5, 1.5, 0.25, -1]).double() @ mapped.query[0] / factor**0.5
    close(query, [-0.95067363, -0.17020816, 0.57645395, 0.06465786, -0.6800511, 0.32185223, -0.15451725, 0.981074])


def test_query_scale_changes_nothing_but_the_split_of_the_factor() -> None:
    order = partition("deal", 8, 4)
    small, large = (key_map(scale * QUERIES, STATS.k_cov, 1e-6, order) for scale in (1.0, 1e8))
    torch.testing.assert_close(small.transform, large.transform, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(small.query, large.query, rtol=1e-9, atol=1e-12)


def test_rows_are_normalised_before_they_are_grouped() -> None:
    rows = torch.arange(1.0, 17.0).double().reshape(1, 2, 8)
    groups = normalised_groups(rows)
    assert groups.shape == (2, 2, 4)
    torch.testing.assert_close(groups.square().sum((0, 2)) / 8, torch.ones(2))
    torch.testing.assert_close(groups[1, 0] / groups[0, 0, 0], torch.tensor([5.0, 6.0, 7.0, 8.0]))
