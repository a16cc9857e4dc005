"""Cutting prompts into forwards."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcq.evaluation.session import Chunking, prefill
from kvcq.spec.boundary import served_boundaries
from tests.evaluation.sessions import PlainRunner, passages
from tests.tiny import tiny_model


@given(st.integers(1, 200), st.integers(1, 64), st.none() | st.integers(1, 199))
def test_spans_partition_the_prompt_at_the_boundaries_of_served_prefill(n, chunk, cached):
    cached = cached if cached is None or cached < n else None
    spans = Chunking(chunk, cached).spans(n)
    assert [start for start, _ in spans] == [0, *(b.position for b in served_boundaries(n, chunk, cached))]
    assert [stop for _, stop in spans] == [*(start for start, _ in spans[1:]), n]
    assert max(stop - start for start, stop in spans) <= chunk
    assert cached is None or cached in {start for start, _ in spans}


def test_a_prefix_outside_the_prompt_is_refused():
    with pytest.raises(ValueError, match="cached prefix of 20"):
        Chunking(8, 20).spans(20)


@pytest.mark.parametrize("chunking", [Chunking(1), Chunking(7), Chunking(64), Chunking(16, 5)])
def test_chunks_of_an_exact_cache_end_in_the_logits_of_one_forward(chunking):
    model, prompt = tiny_model("llama"), passages(1, 40)[0]
    whole = PlainRunner(model=model).start(40).extend(prompt)[-1]
    session = PlainRunner(model=model).start(40)
    torch.testing.assert_close(prefill(session, prompt, chunking), whole, atol=1e-4, rtol=1e-4)
    assert session.length == 40
