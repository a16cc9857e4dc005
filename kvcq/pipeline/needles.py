"""Needle questions of a request: its haystack, its model's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcq.data.documents import Document, describe_sources, iter_documents
from kvcq.data.template import chat_prompt
from kvcq.data.template import encode as encode_document
from kvcq.errors import InputError
from kvcq.evaluation.haystack import NOISE, Haystack, noise_haystack, text_haystack
from kvcq.evaluation.needle import SUBTASKS, Encode, Question, make_questions
from kvcq.models.load import LoadedModel
from kvcq.pipeline.requests import ValidateRequest
from kvcq.pipeline.sources import read_text

# Where a template has channels, an answer belongs into the final one.
FINAL_CHANNEL = "<|channel|>final<|message|>"


@dataclass(frozen=True)
class Needles:
    """The questions, and what they were made with; `template` is False for bare prompts."""

    questions: list[Question]
    haystack: Haystack
    template: bool


def make_needles(request: ValidateRequest, loaded: LoadedModel, contexts: Sequence[int]) -> Needles:
    """Make every question of a request.

    Raises:
        InputError: no tokenizer, an unreadable haystack or template, a context too short for its questions, or a
            prompt that is all in the prefix cache.
    """
    if loaded.tokenizer is None:
        raise InputError("the model has no tokenizer", where=loaded.provenance.source, fix="add its tokenizer files")
    needles = tokenizer_needles(request, loaded.tokenizer, contexts)
    shortest = min(len(question.tokens) for question in needles.questions)
    if request.cached_at is not None and request.cached_at >= shortest:
        raise InputError(
            f"a prefix of {request.cached_at} tokens leaves nothing of a prompt of {shortest}",
            where="--cached-at",
            fix="use a smaller one",
        )
    return needles


def tokenizer_needles(request: ValidateRequest, tokenizer: Any, contexts: Sequence[int]) -> Needles:
    """Make every question of a request with a tokenizer alone; see `make_needles`."""
    haystack = open_haystack(request.haystack, request.text_column)
    template = read_text(request.chat_template, "--chat-template")
    chat = request.template != "raw" and bool(template or tokenizer.chat_template)
    questions = make_questions(
        request.needle_tasks or tuple(SUBTASKS),
        contexts,
        request.needle_depths,
        request.needle_items,
        seed=request.seed,
        text=haystack,
        encode=_chat(tokenizer, template) if chat else _raw(tokenizer),
    )
    return Needles(questions, haystack, chat)


def open_haystack(source: str, text_column: str | None = None) -> Haystack:
    """Read the text that needles are hidden in.

    Raises:
        InputError: neither a built-in text nor a readable file.
    """
    if source == NOISE:
        return noise_haystack()
    if source == "-" or source.startswith("hf:"):
        raise InputError(
            f"{source} is no haystack", where="--haystack", fix=f"name a file, {NOISE} or builtin:pydoc-topics"
        )
    texts = [_text(document) for document in iter_documents([source], text_column=text_column)]
    return text_haystack(describe_sources([source])[0], "\n\n".join(texts))


def stop_tokens(loaded: LoadedModel) -> frozenset[int]:
    """Return the tokens that end an answer: those of the generation configuration and of the tokenizer."""
    configured = getattr(getattr(loaded.model, "generation_config", None), "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    own = getattr(loaded.tokenizer, "eos_token_id", None)
    return frozenset(token for token in (*listed, own) if token is not None)


def _text(document: Document) -> str:
    if document.messages is None:
        return document.text or ""
    return "\n\n".join(turn["content"] for turn in document.messages if isinstance(turn.get("content"), str))


def _chat(tokenizer: Any, template: str | None) -> Encode:
    channel = FINAL_CHANNEL if FINAL_CHANNEL in tokenizer.get_chat_template(template) else ""

    def encode(message: str, prefix: str) -> list[int]:
        turns = [{"role": "user", "content": message}]
        return chat_prompt(tokenizer, turns, chat_template=template, answer_prefix=channel + prefix)

    return encode


def _raw(tokenizer: Any) -> Encode:
    def encode(message: str, prefix: str) -> list[int]:
        ids = encode_document(tokenizer, Document(text=f"{message} {prefix}"), "raw")
        # A tokenizer that ends texts by itself would end the answer before it begins.
        return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids

    return encode
