"""Perplexity in chunks equals the one-pass loss of an exact model, whatever the chunk."""

from math import exp

import numpy as np
import pytest
import torch

from kvcq.errors import EvaluationError
from kvcq.evaluation.perplexity import Reading, block_sums, first_scored, measure_perplexity, read_passage
from kvcq.evaluation.session import Chunking
from kvcq.models.library import forward
from tests.evaluation.sessions import PlainRunner, passages, quiet, scaled
from tests.tiny import tiny_model


def one_pass(model, tokens, first):
    logits = forward(model, tokens[None])[0]
    losses = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
    return losses[first - 1 :].double().numpy()


@pytest.mark.parametrize(
    "chunk, first", [(1, 30), *((chunk, first) for chunk in (7, 32, 500) for first in (1, 30, 32, 33, 63))]
)
def test_chunked_losses_of_an_exact_cache_are_those_of_one_pass(chunk, first):
    model, tokens = tiny_model("llama"), passages(1, 64)[0]
    reading = read_passage(PlainRunner(model=model), tokens, first, Chunking(chunk))
    np.testing.assert_allclose(reading.losses, one_pass(model, tokens, first), atol=1e-4)


def test_all_contexts_come_from_one_reading_and_score_their_second_half():
    model, texts = tiny_model("llama"), passages(2, 192)
    runner = PlainRunner(model=model)
    (scores,) = measure_perplexity([runner], texts, [192, 96], chunking=Chunking(16), progress=quiet)
    assert runner.forwards == 2 * 12
    for score, context in zip(scores, (96, 192), strict=True):
        losses = np.concatenate([one_pass(model, text[:context], context // 2) for text in texts])
        assert (score.context, score.passages, score.tokens) == (context, 2, len(losses))
        assert score.nll == pytest.approx(losses.sum(), rel=1e-5)
        assert score.perplexity == pytest.approx(exp(losses.mean()), rel=1e-5)
        assert sum(score.block_tokens) == score.tokens and sum(score.block_nll) == pytest.approx(score.nll)
        assert score.interval.low < score.perplexity < score.interval.high


def test_an_equal_runner_has_ratio_one_exactly_and_a_worse_one_more():
    model, texts = tiny_model("llama"), passages(2, 64)
    runners = [PlainRunner(model=model), PlainRunner("same", model), PlainRunner("flat", model, scaled(3.0))]
    rows = measure_perplexity(runners, texts, [64], chunking=Chunking(16), progress=quiet)
    reference, same, flat = (row[0] for row in rows)
    assert same == reference and same.ratio == same.ratio_interval.low == same.ratio_interval.high == 1.0
    assert flat.ratio == pytest.approx(flat.perplexity / reference.perplexity)
    assert flat.ratio > 1.0


def test_the_same_seed_gives_the_same_scores():
    model, texts = tiny_model("llama"), passages(1, 64)
    first, again = (
        measure_perplexity([PlainRunner(model=model)], texts, [64], chunking=Chunking(16), progress=quiet)
        for _ in range(2)
    )
    assert first == again


@pytest.mark.parametrize("context, blocks", [(100, 8), (256, 8), (400, 8), (10, 5), (1000, 8), (1280, 10)])
def test_blocks_partition_the_scored_tokens_evenly(context, blocks):
    readings = [Reading(5, np.arange(5, 1280, dtype=np.float64))] * 2
    sums, counts = block_sums(readings, context)
    first = first_scored(context)
    assert len(counts) == 2 * blocks and counts.max() - counts.min() <= 1
    assert counts.sum() == 2 * (context - first) and sums.sum() == 2 * sum(range(first, context))


def test_a_token_that_is_not_finite_names_runner_passage_and_position():
    def broken(logits, length):
        return logits.index_fill(-1, torch.tensor([3]), torch.inf) if length > 40 else logits

    model = tiny_model("llama")
    runners = [PlainRunner(model=model), PlainRunner("bad", model, broken)]
    with pytest.raises(EvaluationError, match="not finite") as caught:
        measure_perplexity(runners, passages(1, 64), [64], chunking=Chunking(16), progress=quiet)
    assert caught.value.where == "perplexity of bad, passage 0, position 32" and caught.value.exit_code == 1


def test_an_impossible_loss_is_an_error_and_no_number():
    model = tiny_model("llama")
    with pytest.raises(EvaluationError, match="no perplexity"):
        measure_perplexity(
            [PlainRunner(model=model, change=scaled(1e4))], passages(1, 64), [64], chunking=Chunking(16), progress=quiet
        )
