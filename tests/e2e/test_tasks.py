"""Model-level tasks on a real model: the order of the methods, and the reference against one pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvcq.data.documents import iter_documents
from kvcq.data.sequences import build_corpus
from kvcq.models.library import forward
from kvcq.models.load import load_model
from kvcq.pipeline.requests import ValidateRequest
from kvcq.pipeline.validate import validate
from tests.e2e.conftest import Quickstart

pytestmark = [pytest.mark.slow, pytest.mark.network]


def test_a_real_model_reads_and_answers_through_the_cache(quick: Quickstart, tmp_path: Path) -> None:
    request = ValidateRequest(
        artifacts=(quick.out / "fits" / "nova", quick.out / "fits" / "naive-int2"),
        model="smollm2-135m",
        data=("builtin:pydoc-topics",),
        out=tmp_path / "report",
        contexts=(640,),
        tasks=("perplexity", "decode-kl", "needle"),
        decode_steps=6,
        needle_tasks=("single_2",),
        needle_items=1,
        needle_depths=(50.0,),
        canary=(),
    )
    report = validate(request).report
    reference, nova, naive = (row.tasks for row in report.artifacts)
    assert reference is not None and nova is not None and naive is not None
    loaded = load_model("smollm2-135m", notify=lambda _: None)
    text = build_corpus(iter_documents(request.data), loaded.tokenizer, labels=("x",), seq_len=640, num_tokens=640)
    tokens = torch.from_numpy(text.sequences[0].tokens.astype("int64"))
    logits = forward(loaded.model, tokens[None])[0]
    losses = torch.nn.functional.cross_entropy(logits[319:-1], tokens[320:], reduction="none")
    assert reference.perplexity[0].nll == pytest.approx(float(losses.sum()), rel=5e-3)
    assert nova.perplexity[0].ratio < 1.1 < naive.perplexity[0].ratio
    assert nova.decode_kl[0].kl < naive.decode_kl[0].kl
    assert reference.needle is not None and reference.needle.score == 1.0 and report.tasks is not None
    assert nova.cache == "packed" and report.tasks.needle is not None and report.tasks.needle.template
