"""`model.generate` on a quantized cache does what it does on the library's own."""

import pytest
import torch

from kvcq.errors import UnsupportedError
from kvcq.models.library import new_cache
from kvcq.spec.plan import Windows
from tests.runtime.hf.setup import CACHE, LOSSLESS, double, host_of, relative, run
from tests.tiny import tiny_tokens


def generate(model, cache, tokens, *, new=24, mask=None, **options):
    tokens = tokens if tokens.ndim == 2 else tokens[None]
    mask = torch.ones_like(tokens) if mask is None else mask
    return model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=new,
        min_new_tokens=new,
        pad_token_id=0,
        **{"do_sample": False, CACHE: cache} | options,
    )


@pytest.fixture(scope="module")
def model():
    return double(num_hidden_layers=2)


@pytest.fixture(scope="module")
def exact(model):
    """Fake quantization without loss: whatever `generate` does must give the library's answers."""
    with host_of(model, *LOSSLESS, mode="simulate") as host:
        yield host


@pytest.fixture
def packed(model):
    with host_of(model, cast=torch.bfloat16) as host:
        yield host


OPTIONS = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"num_beams": 3},
    "beams returned": {"num_beams": 4, "num_return_sequences": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "several answers": {"do_sample": True, "num_return_sequences": 3},
    "chunked prefill": {"prefill_chunk_size": 7},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_lossless_cache_generates_what_the_library_does(model, exact, options):
    tokens = tiny_tokens(30).repeat(2)
    answers = []
    for cache in (new_cache(model), exact.new_cache()):
        torch.manual_seed(0)
        answers.append(generate(model, cache, tokens, **options))
    assert torch.equal(*answers)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}, {"prefill_chunk_size": 9}])
def test_a_padded_batch_generates_what_the_library_does(model, exact, options):
    tokens, mask = tiny_tokens(60).view(2, 30).clone(), torch.ones(2, 30, dtype=torch.long)
    tokens[1, :11], mask[1, :11] = 0, 0
    answers = []
    for cache in (new_cache(model), exact.new_cache()):
        torch.manual_seed(0)
        answers.append(generate(model, cache, tokens, mask=mask, **options))
    assert torch.equal(*answers)


def test_inference_mode_generates_the_same(model, exact):
    tokens, mask = tiny_tokens(60).view(2, 30).clone(), torch.ones(2, 30, dtype=torch.long)
    tokens[1, :11], mask[1, :11] = 0, 0
    wanted = generate(model, exact.new_cache(), tokens, mask=mask, prefill_chunk_size=9)
    with torch.inference_mode():
        found = generate(model, exact.new_cache(), tokens.clone(), mask=mask.clone(), prefill_chunk_size=9)
    assert torch.equal(found, wanted)


def test_an_assistant_model_drafts_for_a_lossless_cache(model, exact):
    assistant, tokens = double(num_hidden_layers=1), tiny_tokens(30)
    answers = [
        generate(model, cache, tokens, assistant_model=assistant) for cache in (new_cache(model), exact.new_cache())
    ]
    assert torch.equal(*answers)


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 5}, {"assistant": True}, {"prefill_chunk_size": 6}])
def test_drafts_and_chunks_do_not_change_what_a_packed_cache_answers(model, packed, options):
    tokens = tiny_tokens(20).repeat(3)
    if options.pop("assistant", False):
        options = {"assistant_model": model}
    wanted = generate(model, packed.new_cache(), tokens)
    assert torch.equal(generate(model, packed.new_cache(), tokens, **options), wanted)


def test_a_batch_of_requests_answers_as_each_alone(model, packed):
    prompts = [tiny_tokens(n, seed=n) for n in (40, 12, 27)]
    tokens, mask = torch.zeros(3, 40, dtype=torch.long), torch.zeros(3, 40, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, 40 - len(prompt) :], mask[row, 40 - len(prompt) :] = prompt, 1
    together = generate(model, packed.new_cache(), tokens, mask=mask)[:, 40:]
    for row, prompt in enumerate(prompts):
        assert torch.equal(generate(model, packed.new_cache(), prompt)[0, len(prompt) :], together[row]), row


def test_a_request_that_ends_early_changes_nothing_for_the_others(model, packed):
    tokens = tiny_tokens(60).view(2, 30)
    free = generate(model, packed.new_cache(), tokens)[:, 30:]
    # The token that only the first answer has early ends it there.
    stop = next(int(token) for token in free[0] if token not in free[1])
    ended = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=24,
        eos_token_id=stop,
        pad_token_id=0,
        do_sample=False,
        **{CACHE: packed.new_cache()},
    )[:, 30:]
    assert (ended[0] == 0).any() and torch.equal(ended[1], free[1])


def test_a_chat_goes_on_with_the_cache_that_came_back(model, packed):
    cache = packed.new_cache()
    first = generate(model, cache, tiny_tokens(30), return_dict_in_generate=True)
    assert getattr(first, CACHE) is cache
    talk = torch.cat([first.sequences, tiny_tokens(10, seed=3)[None]], 1)
    second = generate(model, cache, talk)
    assert torch.equal(second, generate(model, packed.new_cache(), talk))
    assert cache.get_seq_length() == second.shape[1] - 1


def test_a_cache_is_used_again_after_reset(model, packed):
    cache, tokens = packed.new_cache(), tiny_tokens(30)
    wanted = generate(model, cache, tokens)
    cache.reset()
    generate(model, cache, tiny_tokens(50).view(2, 25))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(model, cache, tokens), wanted)


def test_a_prompt_is_read_once_for_many_answers(model, packed):
    cache, tokens = packed.new_cache(), tiny_tokens(40)
    run(model, cache, tokens[:30])
    cache.batch_repeat_interleave(3)
    tails = torch.stack([tiny_tokens(10, seed=seed) for seed in range(3)])
    whole = torch.cat([tokens[:30].expand(3, -1), tails], 1)
    answers = generate(model, cache, whole)
    assert torch.equal(answers, generate(model, packed.new_cache(), whole))
    cache.batch_select_indices(torch.tensor([2]))
    wanted = run(model, packed.new_cache(), answers[2:])[:, -1:]
    assert relative(run(model, cache, answers[2:, -1:]), wanted) < 1e-12


def test_drafts_longer_than_the_slack_of_the_ring_are_refused(model):
    tokens = tiny_tokens(90, seed=5).repeat(2)
    with (
        host_of(model, windows=Windows(sink=2, recent=8)) as host,
        pytest.raises(UnsupportedError, match=r"cannot take back \d+ of \d+ tokens"),
    ):
        generate(model, host.new_cache(), tokens, new=80, prompt_lookup_num_tokens=79)
