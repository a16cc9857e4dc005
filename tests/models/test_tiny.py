import pytest
import torch

from tests.tiny import tiny_model, tiny_tokenizer, tiny_tokens


def test_the_same_seed_gives_the_same_model_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    a, b = tiny_model(), tiny_model()
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("text", ["the and then\nHi", "a\tb {}~"])
def test_the_tokenizer_round_trips_printable_text(text):
    tokenizer = tiny_tokenizer()
    assert len(tokenizer) <= 128
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_attention_of_a_tiny_model_is_far_from_uniform():
    model = tiny_model(attn_implementation="eager")
    weights = model(tiny_tokens(64)[None], output_attentions=True).attentions[-1]
    assert weights[0, :, -1].max() > 3 / 64
