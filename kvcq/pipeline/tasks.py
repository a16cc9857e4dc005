"""Running the model-level tasks of validate: every runner on the same items, scores by artifact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcq.data.sequences import TokenSequence
from kvcq.evaluation.agreement import agreement_score
from kvcq.evaluation.continuation import follow
from kvcq.evaluation.decode_kl import decode_kl_score
from kvcq.evaluation.perplexity import measure_perplexity
from kvcq.evaluation.retrieval import Decode, ask, needle_pairs, needle_score
from kvcq.evaluation.session import Progress, Runner
from kvcq.models.load import LoadedModel
from kvcq.pipeline.needles import Needles, stop_tokens
from kvcq.pipeline.progress import Reporter
from kvcq.pipeline.requests import ValidateRequest
from kvcq.pipeline.runners import Codecs, cache_mode, open_runners
from kvcq.pipeline.subjects import Subject
from kvcq.pipeline.task_plan import Contexts, chunking_of, needle_asked
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.tasks import PairTest, TaskScores

Scores = tuple[list[TaskScores | None], tuple[PairTest, ...]]
"""Of the reference and every artifact in order; and their paired tests."""


def run_tasks(
    request: ValidateRequest,
    loaded: LoadedModel,
    geometry: ModelGeometry,
    subjects: Sequence[tuple[Subject, Codecs]],
    contexts: Contexts,
    passages: Sequence[TokenSequence],
    needles: Needles | None,
    reporter: Reporter,
) -> Scores:
    """Run the tasks of a request except attention.

    Raises:
        EvaluationError: an item failed to run; names it.
        UnsupportedError: the model's attention cannot be observed.
    """
    if set(contexts) == {"attention"}:
        return [None] * (len(subjects) + 1), ()
    scores = [TaskScores(cache="simulate")]
    scores += [TaskScores(cache=cache_mode(codecs, request)) for _, codecs in subjects]
    pairs: tuple[PairTest, ...] = ()
    texts = [torch.from_numpy(passage.tokens.astype("int64")) for passage in passages]
    chunking = chunking_of(request)
    with open_runners(loaded, geometry, subjects, request) as runners:
        if "perplexity" in contexts:
            reporter.stage("perplexity")
            rows = measure_perplexity(
                runners,
                texts,
                contexts["perplexity"],
                chunking=chunking,
                seed=request.seed,
                progress=_progress(reporter, "passages"),
            )
            scores = [own.model_copy(update={"perplexity": row}) for own, row in zip(scores, rows, strict=True)]
        if "agreement" in contexts or "decode-kl" in contexts:
            reporter.stage("continuations")
            scores = _continuations(request, runners, texts, contexts, scores, reporter)
        if needles is not None:
            reporter.stage("needles")
            asked = [needle_asked(request, runner.name) for runner in runners]
            chosen = [runner for runner, wanted in zip(runners, asked, strict=True) if wanted]
            answered = ask(
                chosen,
                needles.questions,
                decode=_decoder(loaded),
                stop=stop_tokens(loaded),
                chunking=chunking,
                progress=_progress(reporter, "answers"),
            )
            found = iter(answered)
            scores = [
                own.model_copy(update={"needle": needle_score(next(found), seed=request.seed)}) if wanted else own
                for own, wanted in zip(scores, asked, strict=True)
            ]
            pairs = needle_pairs([(runner.name, items) for runner, items in zip(chosen, answered, strict=True)])
    return list(scores), pairs


def _continuations(
    request: ValidateRequest,
    runners: Sequence[Runner],
    texts: Sequence[Tensor],
    contexts: Contexts,
    scores: list[TaskScores],
    reporter: Reporter,
) -> list[TaskScores]:
    """Add agreement and decode KL, both from the same continuations."""
    agree, decode = contexts.get("agreement", ()), contexts.get("decode-kl", ())
    count = max(request.new_tokens if agree else 0, request.decode_steps + 1 if decode else 0)
    followed = follow(
        runners,
        texts,
        agree or decode,
        count,
        chunking=chunking_of(request),
        progress=_progress(reporter, "continuations"),
    )
    return [
        own.model_copy(
            update={
                "agreement": tuple(
                    agreement_score(context, found[context], request.new_tokens, seed=request.seed) for context in agree
                ),
                "decode_kl": tuple(
                    decode_kl_score(context, found[context], request.decode_steps, seed=request.seed)
                    for context in decode
                ),
            }
        )
        for own, found in zip(scores, followed, strict=True)
    ]


def _decoder(loaded: LoadedModel) -> Decode:
    tokenizer: Any = loaded.tokenizer  # present: see make_needles
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def _progress(reporter: Reporter, unit: str) -> Progress:
    return lambda done, total: reporter.advance(done, total, unit)
