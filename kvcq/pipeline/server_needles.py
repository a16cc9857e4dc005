"""Needle questions for servers: the very prompts that validate gives to a local cache, as tokens."""

from __future__ import annotations

from kvcq.evaluation.questions import Question, Row
from kvcq.models.load import load_tokenizer
from kvcq.pipeline.needles import tokenizer_needles
from kvcq.pipeline.progress import Reporter
from kvcq.pipeline.requests import ValidateRequest


def server_needles(request: ValidateRequest, reporter: Reporter) -> tuple[Question, ...]:
    """Make the needle questions of a request, one task a context; the score of an item is its share of needles.

    Args:
        request: Its model names the tokenizer, which must be that of the server.
        reporter: Told about slow steps.

    Raises:
        InputError: no tokenizer, an unreadable haystack, or a context too short for its questions.
        UnavailableError: the model hub is not reachable.
    """
    tokenizer = load_tokenizer(
        request.model,
        revision=request.revision,
        trust_remote_code=request.trust_remote_code,
        notify=reporter.note,
    )
    contexts = tuple(sorted(set(request.needle_lengths or request.contexts)))
    return tuple(
        Question(
            task=f"needle-{made.context}",
            id=f"{made.task}-{made.row}-depth-{made.depth:g}",
            row=Row(prompt=made.message, answers=made.answers, metric="needles"),
            tokens=made.tokens,
            max_tokens=made.new_tokens,
        )
        for made in tokenizer_needles(request, tokenizer, contexts).questions
    )
