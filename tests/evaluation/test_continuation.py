"""Agreement and decode KL: an equal runner is the reference exactly; a different one is measured where it differs."""

import numpy as np
import pytest
import torch

from kvcq.errors import EvaluationError
from kvcq.evaluation.agreement import agreement_score
from kvcq.evaluation.continuation import BLOCK, Steps, blocks, compare, follow, lead
from kvcq.evaluation.decode_kl import decode_kl_score
from kvcq.evaluation.session import Chunking
from tests.evaluation.sessions import PlainRunner, passages, quiet, scaled
from tests.tiny import tiny_model

CHUNKS = Chunking(16)


def followed(change=lambda logits, length: logits, contexts=(32, 48), count=12):
    model = tiny_model("llama")
    runners = [PlainRunner(model=model), PlainRunner("other", model, change)]
    return follow(runners, passages(2, 48), contexts, count, chunking=CHUNKS, progress=quiet)


def steps(same, kl=None, gap=None):
    same = np.asarray(same, np.float64)
    rest = np.zeros_like(same)
    return Steps(rest if kl is None else np.asarray(kl), same, rest if gap is None else np.asarray(gap), rest, rest)


def test_an_equal_runner_agrees_everywhere_and_has_no_divergence():
    for found in followed():
        for context, prompts in found.items():
            score = agreement_score(context, prompts, 12)
            assert (score.prompts, score.tokens, score.first_divergence) == (2, 24, (None, None))
            assert score.agreement == score.interval.low == score.interval.high == 1.0
            assert score.kl == score.kl_max == 0.0 and score.near_ties == 0
            decode = decode_kl_score(context, prompts, 11)
            assert decode.kl == decode.kl_max == decode.interval.high == 0.0 and decode.top1 == 1.0
            assert decode.nll == decode.nll_reference and decode.steps == 22


def test_another_temperature_keeps_the_tokens_and_has_the_kl_of_the_temperature():
    reference, other = followed(scaled(2.0))
    prompts = other[48]
    assert agreement_score(48, prompts, 12).agreement == 1.0
    trace = lead(PlainRunner(model=tiny_model("llama")), passages(2, 48)[0], 12, CHUNKS)
    log_p = torch.log_softmax(trace.logits.double(), -1)
    log_q = torch.log_softmax(2 * trace.logits.double(), -1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).numpy()
    np.testing.assert_allclose(prompts[0].kl, kl, rtol=1e-5)
    np.testing.assert_allclose(prompts[0].nll, -log_q.max(-1).values.numpy(), rtol=1e-5)
    score = decode_kl_score(48, prompts, 11)
    pooled = np.concatenate([own.kl[1:12] for own in prompts])
    assert score.kl == pytest.approx(pooled.mean()) and score.kl_max == pooled.max()
    assert score.kl_median == pytest.approx(np.median(pooled))
    assert score.nll_reference == pytest.approx(np.mean([own.nll_reference[1:12] for own in reference[48]]))


def test_a_wrong_step_is_the_first_divergence_and_the_reference_goes_on():
    def flipped(logits, length):
        return -logits if length == 48 + 5 else logits

    score = agreement_score(48, followed(flipped, contexts=(48,))[1][48], 12)
    assert score.first_divergence == (5, 5)
    assert score.agreement == pytest.approx(11 / 12)
    assert score.interval.low < score.agreement <= score.interval.high


def test_the_reference_continues_greedily_on_its_own_tokens():
    runner = PlainRunner(model=tiny_model("llama"))
    trace = lead(runner, passages(1, 32)[0], 6, CHUNKS)
    assert runner.forwards == 2 + 5
    assert torch.equal(trace.tokens, trace.logits.argmax(-1))
    whole = torch.cat([passages(1, 32)[0], trace.tokens[:-1]])
    session = runner.start(len(whole))
    torch.testing.assert_close(session.extend(whole, keep=6), trace.logits, atol=1e-4, rtol=1e-4)


def test_near_ties_are_divergences_where_the_reference_is_undecided():
    tie = steps([1, 0, 1], gap=[0.0, 0.05, 0.0])
    clear = steps([0, 1, 1], gap=[2.0, 0.0, 0.0])
    none = steps([1, 1, 1], gap=[0.0, 0.0, 0.0])
    score = agreement_score(8, [tie, clear, none], 3)
    assert score.first_divergence == (1, 0, None) and score.near_ties == 1
    assert score.agreement == pytest.approx(7 / 9)


def test_the_gap_is_that_of_the_two_likeliest_tokens():
    trace = lead(PlainRunner(model=tiny_model("llama")), passages(1, 32)[0], 3, CHUNKS)
    top = torch.log_softmax(trace.logits.double(), -1).topk(2).values
    np.testing.assert_allclose(compare(trace, trace.logits).gap, (top[:, 0] - top[:, 1]).numpy())


def test_intervals_resample_blocks_of_steps():
    # Eight blocks of two, half of them right: the percentiles of a binomial of eight.
    score = agreement_score(8, [steps([1] * BLOCK + [0] * BLOCK)], 2 * BLOCK)
    assert (score.interval.low, score.interval.high) == (1 / 8, 7 / 8)


@pytest.mark.parametrize("lengths", [(8,), (9,), (16, 16), (64,), (100, 33), (1,) * 8])
def test_there_are_eight_blocks_at_least_and_none_is_long(lengths):
    sums, sizes = blocks([np.ones(length) for length in lengths])
    assert len(sizes) >= 8 and max(sizes) <= BLOCK and sum(sizes) == sum(sums) == sum(lengths)


@pytest.mark.parametrize("score", [lambda p: agreement_score(8, p, 4), lambda p: decode_kl_score(8, p, 3)])
def test_too_few_steps_are_refused(score):
    for prompts in ([], [steps([1, 1, 1])]):
        with pytest.raises(ValueError, match="followed so far"):
            score(prompts)


def test_a_failing_runner_stops_everything_and_names_the_item():
    def failing(logits, length):
        if length == 50:
            raise RuntimeError("no such kernel")
        return logits

    with pytest.raises(EvaluationError, match="no such kernel") as caught:
        followed(failing, contexts=(48,))
    assert caught.value.where == "continuation by other, context 48, passage 0"
