import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcq.codecs.windows import oldest_served
from kvcq.errors import EvaluationError, InputError
from kvcq.evaluation import attention
from kvcq.evaluation.attention import measure_layer, query_positions
from kvcq.evaluation.pool import pool_metrics
from kvcq.evaluation.simulate import exact_served, simulated_attention
from kvcq.spec.boundary import served_boundaries
from kvcq.spec.plan import Windows
from tests.evaluation.helpers import kl, plain, random_block, random_codec

WINDOWS = Windows(sink=4, recent=8)
TOKENS = 90
POSITIONS = query_positions(TOKENS, 6)
SINKS = torch.tensor([0.3, -1.0, 2.0, 4.0])
OPTIONS = {"plain": {}, "softcap": {"softcap": 3.0}, "sinks": {"sinks": SINKS}}


@given(context=st.integers(4, 5000), count=st.integers(2, 100))
def test_queries_are_distinct_spread_and_in_the_last_quarter(context, count):
    positions = query_positions(context, count)
    steps = positions.diff()
    assert positions[-1] == context - 1
    assert positions[0] == context - context // 4
    assert len(positions) == min(count, context // 4)
    assert len(steps) == 0 or (steps.min() >= 1 and steps.max() - steps.min() <= 1)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("offset", [1.0, 100.0])
def test_a_lossless_codec_measures_nothing(options, offset):
    block = random_block(POSITIONS, TOKENS, **options)
    metrics = pool_metrics([measure_layer(block, random_codec(block.geometry, offset=offset), WINDOWS)])
    for name, value in metrics:
        if name.startswith("top1"):
            assert value == 1.0
        else:
            assert value < 1e-6, name


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_metric_agrees_with_loops_over_heads_and_queries(options):
    block = random_block(POSITIONS, TOKENS, **options)
    shape, q, k, v = block.geometry, block.q, block.k, block.v
    codec = random_codec(shape, quantizer="uniform", transform="orthogonal")
    moment = torch.eye(16, dtype=torch.float64) * torch.arange(1.0, 17.0)
    metrics = pool_metrics([measure_layer(block, codec, WINDOWS, moment.expand(2, -1, -1))])

    keys = torch.arange(TOKENS)
    visible = keys <= POSITIONS[:, None]
    history = (keys >= WINDOWS.sink) & (keys <= POSITIONS[:, None] - WINDOWS.recent)
    k_hat = codec.keys_back(codec.decode_keys(codec.encode_keys(codec.key_frame(k))))
    v_hat = codec.values_back(codec.decode_values(codec.encode_values(codec.value_frame(v))))
    mask = history[None, :, :, None]
    k_mix, v_mix = torch.where(mask, k_hat[:, None], k[:, None]), torch.where(mask, v_hat[:, None], v[:, None])
    attend = {"scaling": block.scaling} | options
    past = attend | {"sinks": None}
    o, p = plain(q, k, v, visible, **attend)
    o_hat, p_hat = plain(q, k_mix, v_mix, visible, **attend)
    o_v, _ = plain(q, k, v_mix, visible, **attend)
    _, p_past = plain(q, k, v, history, **past)
    _, p_past_hat = plain(q, k_mix, v_mix, history, **past)

    def ratio(error, energy):
        return float(error.double().square().sum() / energy.double().square().sum())

    heads = range(4)
    kls = np.array([[kl(a, b) for a, b in zip(p[h], p_hat[h], strict=True)] for h in heads])
    wanted_history = [kl(a, b) for h in heads for a, b in zip(p_past[h], p_past_hat[h], strict=True)]
    size = visible.sum(1)
    top1 = [p[h][i][: size[i]].argmax() == p_hat[h][i][: size[i]].argmax() for h in heads for i in range(6)]
    top1_history = [p_past[h][i].argmax() == p_past_hat[h][i].argmax() for h in heads for i in range(6)]
    coded = slice(WINDOWS.sink, TOKENS - WINDOWS.recent)
    kc, vc, ek = k[:, coded], v[:, coded], (k - k_hat)[:, coded].double()
    logit_errors = []
    for h in heads:
        for i in range(6):
            error = block.scaling * (q[h, i].double() @ (k_hat - k)[h // 2, history[i]].double().T)
            logit_errors.append(error - error.mean())

    assert metrics.kl == pytest.approx(kls.mean(), rel=1e-4)
    assert metrics.kl_geometric == pytest.approx(math.exp(np.log(kls.mean(1)).mean()), rel=1e-4)
    assert metrics.kl_p95 == pytest.approx(np.quantile(kls, 0.95), rel=1e-4)
    assert metrics.kl_history == pytest.approx(np.mean(wanted_history), rel=1e-4)
    assert metrics.top1 == pytest.approx(np.mean(top1))
    assert metrics.top1_history == pytest.approx(np.mean(top1_history))
    assert metrics.output_error == pytest.approx(ratio(o_hat - o, o), rel=1e-4)
    centred, centred_hat = o - o.mean(1, keepdim=True), o_hat - o_hat.mean(1, keepdim=True)
    assert metrics.output_centred_error == pytest.approx(ratio(centred_hat - centred, centred), rel=1e-4)
    assert metrics.sv_error == pytest.approx(ratio(o_v - o, o), rel=1e-4)
    assert metrics.k_error == pytest.approx(ratio(ek, kc), rel=1e-4)
    assert metrics.k_centred_error == pytest.approx(ratio(ek, kc - kc.mean(1, keepdim=True)), rel=1e-4)
    assert metrics.v_error == pytest.approx(ratio((v - v_hat)[:, coded], vc), rel=1e-4)
    root = moment.sqrt()
    assert metrics.k_query_error == pytest.approx(ratio(ek @ root, kc.double() @ root), rel=1e-4)
    assert metrics.qk_error == pytest.approx(float(torch.cat(logit_errors).square().mean()), rel=1e-4)


def test_without_a_moment_the_block_weighs_by_its_own_queries():
    block = random_block(POSITIONS, TOKENS)
    codec = random_codec(block.geometry, quantizer="uniform", transform="orthogonal")
    q = block.q.double().reshape(2, -1, 16)
    sample = measure_layer(block, codec, WINDOWS)
    assert sample.k_query == pytest.approx(measure_layer(block, codec, WINDOWS, q.mT @ q / 12).k_query)


def test_the_bf16_reference_is_nearly_but_not_quite_exact():
    block = random_block(POSITIONS, TOKENS)
    sample = measure_layer(block, None, WINDOWS)
    metrics = pool_metrics([sample])
    for error in (metrics.k_error, metrics.v_error, metrics.sv_error, metrics.output_error):
        assert 1e-7 < error < 2e-5
    assert 0.0 < metrics.kl < 1e-4
    assert sample.quantized_reads == 0


def test_reads_are_counted_by_the_window_rule():
    block = random_block(POSITIONS, TOKENS)
    sample = measure_layer(block, random_codec(block.geometry), WINDOWS)
    pairs = [(int(i), j) for i in POSITIONS for j in range(int(i) + 1)]
    assert sample.reads == 4 * len(pairs)
    assert sample.quantized_reads == 4 * sum(WINDOWS.sink <= j <= i - WINDOWS.recent for i, j in pairs)


def test_queries_without_history_count_in_the_full_softmax_only():
    block = random_block(torch.tensor([5, 60, 89]), TOKENS)
    sample = measure_layer(block, random_codec(block.geometry, quantizer="uniform", transform="orthogonal"), WINDOWS)
    assert sample.kl.shape == sample.top1.shape == (4, 3)
    assert sample.kl_history.shape == sample.top1_history.shape == (4, 2)
    assert (sample.kl[:, 0] < 1e-9).all()


def test_blocks_of_queries_and_threads_do_not_change_a_bit(monkeypatch):
    block = random_block(query_positions(600, 32), 600)
    codec = random_codec(block.geometry, quantizer="uniform", transform="orthogonal")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = pool_metrics([measure_layer(block, codec, WINDOWS)])
        torch.set_num_threads(2)
        assert pool_metrics([measure_layer(block, codec, WINDOWS)]) == one
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(attention, "SCORE_ELEMENTS", 4 * 600 * 5)
    parts = pool_metrics([measure_layer(block, codec, WINDOWS)])
    assert dict(parts) == pytest.approx(dict(one), rel=1e-5)


def test_the_cast_of_the_served_rows_shows():
    block = random_block(POSITIONS, TOKENS)
    cast = measure_layer(block, random_codec(block.geometry, cast=torch.bfloat16), WINDOWS)
    assert 1e-9 < pool_metrics([cast]).kl < 1e-3


def test_kl_and_top1_of_the_golden_softmax():
    scaling = 8**-0.5
    logits = torch.tensor([[[-2.125, 1.125, -1.3125, 3.625]]], dtype=torch.float64) * scaling
    served = torch.tensor([[[-2.92708290, 1.23142832, -1.15159227, 0.66229673]]], dtype=torch.float64) * scaling
    log_p, log_q = torch.log_softmax(logits, -1), torch.log_softmax(served, -1)
    assert attention._kl(log_p.exp(), log_p, log_q).item() == pytest.approx(0.1360016555621965, abs=1e-8)
    assert logits.argmax() != served.argmax()


@pytest.mark.parametrize("tokens", [10, WINDOWS.sink + WINDOWS.recent + 64])
def test_a_context_within_the_windows_is_refused(tokens):
    block = random_block(query_positions(tokens, 4), tokens)
    with pytest.raises(InputError, match=r"nothing was quantized.*sink 4 \+ recent 8"):
        measure_layer(block, random_codec(block.geometry), WINDOWS)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_non_finite_row_names_the_layer(name):
    block = random_block(POSITIONS, TOKENS, layer=7)
    getattr(block, name)[0, 3] = torch.nan
    with pytest.raises(EvaluationError, match="layer 7"):
        measure_layer(block, random_codec(block.geometry), WINDOWS)


@pytest.mark.parametrize("boundaries", [served_boundaries(TOKENS, 30), served_boundaries(TOKENS, 32, 75)])
def test_served_exactness_measures_the_attention_of_the_chunked_prefill(boundaries):
    block = random_block(POSITIONS, TOKENS)
    codec = random_codec(block.geometry, quantizer="uniform", transform="orthogonal")
    oldest = oldest_served(TOKENS, boundaries, WINDOWS)[POSITIONS]
    sample = measure_layer(block, codec, WINDOWS, oldest=oldest)
    visible = torch.arange(TOKENS) <= POSITIONS[:, None]
    exact = exact_served(TOKENS, boundaries, WINDOWS)[POSITIONS]
    served = simulated_attention(block.q, block.k, block.v, codec, exact, visible, scaling=block.scaling).double()
    plain_output = simulated_attention(
        block.q, block.k, block.v, codec, torch.ones_like(exact), visible, scaling=block.scaling
    ).double()
    assert sample.output.error == pytest.approx(float((served - plain_output).square().sum()), rel=1e-3)
    assert sample.quantized_reads == 4 * int((visible & ~exact).sum())
