import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvcq.evaluation.attention import measure_layer, query_positions
from kvcq.evaluation.pool import KL_FLOOR, Ratio, pool_context, pool_layer, pool_metrics
from kvcq.spec.plan import Windows
from tests.evaluation.helpers import random_block, random_codec

WINDOWS = Windows(sink=4, recent=8)


def sample(layer: int = 0, seed: int = 0, tokens: int = 90, codec: bool = True):
    block = random_block(query_positions(tokens, 6), tokens, layer=layer, seed=seed)
    coder = random_codec(block.geometry, quantizer="uniform", transform="orthogonal") if codec else None
    return measure_layer(block, coder, WINDOWS)


def test_pooling_is_over_queries_and_energies_not_over_means():
    a, b = sample(seed=1), replace(sample(seed=2), kl=np.full((4, 1), 3.0), k=Ratio(9.0, 10.0))
    pooled = pool_metrics([a, b])
    both = np.concatenate([a.kl.ravel(), b.kl.ravel()])
    assert pooled.kl == pytest.approx(both.mean())
    assert pooled.kl_p95 == pytest.approx(np.quantile(both, 0.95))
    assert pooled.k_error == pytest.approx((a.k.error + 9.0) / (a.k.energy + 10.0))
    heads = np.concatenate([a.kl, b.kl], 1).mean(1)
    assert pooled.kl_geometric == pytest.approx(math.exp(np.log(heads).mean()))


def test_heads_of_different_layers_are_different_heads():
    a, b = sample(layer=0), sample(layer=3, seed=5)
    means = np.concatenate([a.kl.mean(1), b.kl.mean(1)])
    assert pool_metrics([a, b]).kl_geometric == pytest.approx(math.exp(np.log(means).mean()))


def test_an_exact_head_has_a_floor_in_the_geometric_mean():
    exact = replace(sample(), kl=np.zeros((4, 6)))
    assert pool_metrics([exact]).kl_geometric == pytest.approx(KL_FLOOR)


def test_zero_energy_gives_a_finite_error():
    empty = replace(sample(), v=Ratio(0.0, 0.0), sv=Ratio(1.0, 0.0))
    pooled = pool_metrics([empty])
    assert pooled.v_error == 0.0
    assert math.isfinite(pooled.sv_error)


def test_a_context_report_counts_passages_queries_and_reads():
    samples = [sample(layer, seed) for layer in (0, 1) for seed in (1, 2, 3)] + [
        sample(2, seed, codec=False) for seed in (1, 2, 3)
    ]
    report = pool_context(samples)
    assert (report.context, report.passages, report.queries) == (90, 3, 18)
    coded = samples[0].quantized_reads / samples[0].reads
    assert report.quantized_share == pytest.approx(coded * 2 / 3)
    assert report.metrics == pool_metrics(samples)


def test_a_layer_report_has_one_kl_per_head_and_the_largest_mean_ratio():
    samples = [sample(2, seed) for seed in (1, 2)]
    report = pool_layer(samples)
    assert report.layer == 2
    assert report.kl_heads == pytest.approx(np.concatenate([s.kl for s in samples], 1).mean(1))
    coded = [random_block(query_positions(90, 6), 90, seed=seed).k[:, 4:82].double() for seed in (1, 2)]
    keys = torch.cat(coded, 1)
    ratio = keys.mean(1).square().sum(-1) / keys.var(1, correction=0).sum(-1)
    assert report.mean_ratio == pytest.approx(float(ratio.max()))


def test_constant_keys_have_a_finite_mean_ratio():
    constant = replace(sample(), key_sum=np.ones((2, 16)) * 78, key_energy=np.ones(2) * 16 * 78)
    assert 1e6 < pool_layer([constant]).mean_ratio < math.inf


@pytest.mark.parametrize(
    ("pool", "samples"),
    [
        (pool_metrics, []),
        (pool_layer, [(0, 90), (1, 90)]),
        (pool_context, [(0, 90), (0, 120)]),
        (pool_context, [(0, 90), (0, 90), (1, 90)]),
    ],
)
def test_samples_that_do_not_belong_together_are_refused(pool, samples):
    with pytest.raises(ValueError, match=r"samples|needs"):
        pool([sample(layer, tokens=tokens) for layer, tokens in samples])
