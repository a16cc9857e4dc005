from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcq.runtime.hf.engine.sampling import Sampler, Sampling, score

LOGITS = torch.tensor([0.5, 2.0, -1.0, 2.0, 1.0])


def draws(sampling, logits=LOGITS, count=200):
    sampler = Sampler(sampling)
    return [sampler.choose(logits) for _ in range(count)]


def test_greedy_takes_the_lowest_id_of_the_likeliest():
    assert set(draws(Sampling(seed=3), count=5)) == {1}


def test_a_seed_repeats_its_draws_and_another_does_not():
    first = draws(Sampling(temperature=1.0, seed=7))
    assert first == draws(Sampling(temperature=1.0, seed=7)) != draws(Sampling(temperature=1.0, seed=8))
    assert draws(Sampling(temperature=1.0)) != draws(Sampling(temperature=1.0))


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=1.0, top_k=2, seed=0), {1, 3}),
        (Sampling(temperature=1.0, top_k=3, seed=0), {1, 3, 4}),
        (Sampling(temperature=1.0, top_p=0.3, seed=0), {1}),
        (Sampling(temperature=1.0, top_p=0.7, seed=0), {1, 3}),
        (Sampling(temperature=1e-6, seed=0), {1, 3}),
        (Sampling(temperature=2.0, seed=0), {0, 1, 2, 3, 4}),
    ],
)
def test_draws_stay_in_the_kept_set(sampling, kept):
    assert set(draws(sampling, count=400)) == kept


def test_frequencies_are_the_probabilities():
    found = torch.bincount(torch.tensor(draws(Sampling(temperature=0.7, seed=1), count=8000)), minlength=5) / 8000
    assert torch.allclose(found, (LOGITS / 0.7).softmax(-1), atol=0.02)


@given(st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=12), st.integers(0, 20))
def test_scores_are_log_probabilities_of_the_model(values, top):
    logits = torch.tensor(values)
    own, best = score(logits, 1, top)
    wanted = logits.double().log_softmax(-1)
    assert own == pytest.approx(float(wanted[1]), abs=1e-4)
    assert len(best) == min(top, len(values))
    assert [value for _, value in best] == sorted((value for _, value in best), reverse=True)
    assert all(value == pytest.approx(float(wanted[token]), abs=1e-4) for token, value in best)
