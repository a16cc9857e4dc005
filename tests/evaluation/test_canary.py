import numpy as np
import pytest
import torch

from kvcq.errors import EvaluationError, InputError
from kvcq.evaluation.canary import (
    build_canary,
    canary_boundary,
    canary_length,
    canary_passages,
    canary_statistic,
    canary_verdict,
)
from kvcq.spec.plan import Windows

WINDOWS = Windows(sink=4, recent=80)


def encode(text: str) -> list[int]:
    return [1, *(3 + ord(letter) % 100 for letter in text)]


def fake_logits(noise: float = 0.5):
    """Logits as a function of the tokens; the quantized model adds noise of its own, the same every time."""

    def logits(tokens, positions, exact):
        generator = torch.Generator().manual_seed(int(tokens.sum()))
        base = torch.randn(len(positions), 128, generator=generator)
        return base if exact is None else base + noise * torch.randn(base.shape, generator=generator)

    return logits


def test_passages_are_our_own_ascii_prose_of_400_words():
    passages = canary_passages()
    assert len(passages) == 3
    assert all(text.isascii() and len(text.split()) >= 400 for text in passages)


def test_facts_return_in_the_second_half():
    halves = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in canary_passages()]
    for (first, second), fact in zip(halves, ("214 steps", "38 minutes at 230", "6 exposures of 300"), strict=True):
        assert fact in first
        assert fact in second


def test_default_windows_give_the_chunks_of_the_design():
    assert canary_length(Windows()) == 64 + 256 + 192
    assert canary_boundary(Windows()) == 64 + 192
    assert canary_boundary(Windows(sink=4, recent=8)) == 4 + 8 + 192 - 64


def test_the_record_holds_both_models_at_the_likeliest_tokens():
    record = build_canary(fake_logits(), encode, WINDOWS)
    arrays, length = record.arrays, canary_length(WINDOWS)
    assert {name: (array.shape, array.dtype.name) for name, array in arrays.items()} == {
        "tokens": ((3, length), "int32"),
        "positions": ((64,), "int32"),
        "ids": ((3, 64, 32), "int32"),
        "b": ((3, 64, 32), "float32"),
        "s": ((3, 64, 32), "float32"),
    }
    assert record.tokens == length
    assert arrays["positions"][0] == canary_boundary(WINDOWS)
    assert arrays["positions"][-1] == length - 2
    assert (np.diff(arrays["b"], axis=-1) <= 0).all()
    assert record.deviation == pytest.approx(np.sqrt(np.mean((arrays["s"].astype(float) - arrays["b"]) ** 2)))
    assert 0.3 < record.deviation < 0.8
    again = build_canary(fake_logits(), encode, WINDOWS)
    assert all(np.array_equal(array, again.arrays[name]) for name, array in arrays.items())


def test_the_quantized_pass_sees_one_cached_boundary():
    masks = []

    def logits(tokens, positions, exact):
        masks.append(exact)
        return fake_logits()(tokens, positions, exact)

    build_canary(logits, encode, WINDOWS)
    boundary = canary_boundary(WINDOWS)
    assert [mask is None for mask in masks] == [True, False] * 3
    second = masks[1][boundary:]
    assert second[:, :4].all()
    assert not second[:, 4:boundary].any()
    assert second[:, boundary:].all()


def test_a_short_text_is_repeated_whole():
    words: dict[str, int] = {}

    def by_sentence(text: str) -> list[int]:
        return [3 + words.setdefault(part, len(words)) % 120 for part in text.split(".")]

    record = build_canary(fake_logits(), by_sentence, WINDOWS)
    assert record.arrays["tokens"].shape == (3, canary_length(WINDOWS))


def test_the_statistic_is_one_for_quantized_zero_for_exact_and_blind_to_independent_noise():
    arrays = build_canary(fake_logits(), encode, WINDOWS).arrays
    b, s = arrays["b"], arrays["s"]
    noise = np.random.default_rng(0).normal(0, 0.1, b.shape)
    assert canary_statistic(s, b, s) == pytest.approx(1.0)
    assert canary_statistic(b, b, s) == 0.0
    assert canary_verdict(canary_statistic(s + noise, b, s)) == "active"
    assert canary_verdict(canary_statistic(b + noise, b, s)) == "off"


@pytest.mark.parametrize(
    ("statistic", "verdict"), [(0.7, "active"), (0.69, "undecided"), (0.31, "undecided"), (0.3, "off"), (-1.0, "off")]
)
def test_thresholds(statistic, verdict):
    assert canary_verdict(statistic) == verdict


def test_a_statistic_that_cannot_tell_is_refused():
    b = np.zeros((3, 4))
    with pytest.raises(EvaluationError, match="equal"):
        canary_statistic(b, b, b)
    with pytest.raises(EvaluationError, match="incomplete"):
        canary_statistic(b[:2], b, b + 1)
    with pytest.raises(EvaluationError, match="not finite"):
        canary_statistic(b * np.nan, b, b + 1)


def test_a_broken_model_or_tokenizer_is_named():
    with pytest.raises(InputError, match="no tokens"):
        build_canary(fake_logits(), lambda text: [], WINDOWS)
    with pytest.raises(EvaluationError, match="quantized model"):
        build_canary(fake_logits(float("nan")), encode, WINDOWS)
