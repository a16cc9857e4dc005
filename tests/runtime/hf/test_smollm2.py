"""A real model: packed, simulated and an exact pass in float64 give the same greedy answers, alone and in a batch."""

import copy

import pytest
import torch
from transformers import DynamicCache

from kvcq.data.builtin import pydoc_topics
from kvcq.models.load import load_model
from kvcq.spec.plan import Windows
from tests.runtime.hf.near_ties import check_answers
from tests.runtime.hf.setup import CACHE, INT2, LOSSLESS, codecs_of, host_of, one_pass, relative, run, window_mask

pytestmark = [pytest.mark.slow, pytest.mark.network]
SMALL = Windows(sink=16, recent=64)


@pytest.fixture(scope="module")
def loaded():
    return load_model("smollm2-135m", device="cpu")


def prompts(loaded, lengths):
    text = "\n".join(pydoc_topics())
    tokens = torch.tensor(loaded.tokenizer(text[:40000]).input_ids)
    return [tokens[1000 * i : 1000 * i + n] for i, n in enumerate(lengths)]


def test_answers_are_those_of_an_exact_pass_alone_and_in_a_batch(loaded):
    model, exact = loaded.model, copy.deepcopy(loaded.model).double()
    options = {"offset": 0.0, "cast": torch.bfloat16}
    codecs = codecs_of(model, INT2, INT2, **options)

    def reference(tokens):
        return one_pass(exact, codecs, tokens, window_mask(len(tokens), SMALL))

    with host_of(exact, windows=SMALL, **options) as host:
        # In float64 the packed cache is the one pass; what float32 adds are codes that fall on the other side.
        tokens = prompts(loaded, (150,))[0]
        assert relative(run(exact, host.new_cache(), tokens, [90, 1, 59]), reference(tokens)) < 1e-6
    with (
        host_of(model, windows=SMALL, **options) as packed,
        host_of(model, windows=SMALL, mode="simulate", **options) as simulated,
    ):
        results = check_answers(model, (packed, simulated), reference, prompts(loaded, (150, 110, 130)), 8)
    for against_exact, in_batch in results:
        print(against_exact, in_batch)
        assert against_exact.ties <= 1 and against_exact.mean < 0.5
        assert in_batch.ties <= 1 and in_batch.mean < 0.1


def test_generate_in_its_forms_on_a_real_model(loaded):
    model = loaded.model
    tokens = prompts(loaded, (48,))[0][None].repeat(1, 2)

    def answers(cache, **options):
        torch.manual_seed(0)
        return model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, **{CACHE: cache} | options
        )

    forms = (
        {"do_sample": False},
        {"do_sample": True},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": False, "prompt_lookup_num_tokens": 6},
        {"do_sample": False, "prefill_chunk_size": 64},
    )
    wanted = [answers(DynamicCache(config=model.config), **form) for form in forms]
    with host_of(model, *LOSSLESS, mode="simulate") as host:
        for form, expected in zip(forms, wanted, strict=True):
            assert torch.equal(answers(host.new_cache(), **form), expected), form
