"""Documents to token ids: the template policy, and long texts in pieces.

A rendered chat template already writes every special token it wants, so it is tokenized without special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from kvcq.data.documents import Document
from kvcq.data.rendering import find_template, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Policy = Literal["auto", "chat", "raw"]

PIECE = 16384
_LINE = re.compile(r"(?<=\S)\n(?=\S)")
_WORD = re.compile(r"(?<=\S)(?= \S)")


def resolve_policy(document: Document, policy: Policy) -> Literal["chat", "raw"]:
    """Say what `policy` means for this document: ``auto`` is chat for conversations, raw for texts."""
    if policy == "auto":
        return "chat" if document.messages is not None else "raw"
    return policy


def encode(
    tokenizer: PreTrainedTokenizerBase, document: Document, policy: Policy = "auto", chat_template: str | None = None
) -> list[int]:
    """Tokenize one document.

    Args:
        tokenizer: The model's tokenizer.
        document: A text or a conversation.
        policy: ``chat`` renders the chat template (a text becomes one user turn), ``raw`` tokenizes the text with
            the tokenizer's own special tokens (a conversation becomes its contents, separated by blank lines),
            ``auto`` decides by the document.
        chat_template: Jinja2 text that replaces the tokenizer's template.

    Raises:
        InputError: the tokenizer has no chat template, or the template refuses the conversation.
    """
    return [i for piece in iter_tokens(tokenizer, document, policy, chat_template) for i in piece]


def iter_tokens(
    tokenizer: PreTrainedTokenizerBase, document: Document, policy: Policy = "auto", chat_template: str | None = None
) -> Iterator[list[int]]:
    """Yield the ids of `encode` piece by piece, so that a caller may stop early in a long text."""
    if resolve_policy(document, policy) == "chat":
        messages = document.messages or [{"role": "user", "content": document.text}]
        fix = "give plain text (--template raw, or --text-column), or pass --chat-template FILE"
        for piece in pieces(render(tokenizer, messages, find_template(tokenizer, chat_template, fix))):
            yield _ids(tokenizer, piece, special=False)
        return
    before, after = _specials(tokenizer)
    yield before
    for piece in pieces(_plain(document)):
        yield _ids(tokenizer, piece, special=False)
    yield after


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    answer_prefix: str = "",
    thinking: bool = False,
) -> list[int]:
    """Return the token ids of a conversation up to where the model's answer starts.

    The prompt is tokenized as one text with what the template wrote and nothing else, as servers do. A template that
    has a switch ``enable_thinking`` gets `thinking`; others are not told.

    Args:
        tokenizer: The model's tokenizer.
        messages: The turns so far, each with ``role`` and ``content``.
        chat_template: Jinja2 text that replaces the tokenizer's template.
        answer_prefix: First words of the answer, put into the assistant's turn.
        thinking: Let the model reason before it answers.

    Raises:
        InputError: the tokenizer has no chat template, or the template refuses the conversation.
    """
    template = find_template(tokenizer, chat_template, "pass --chat-template FILE")
    options = {"enable_thinking": thinking} if "enable_thinking" in template else {}
    text = render(tokenizer, [dict(turn) for turn in messages], template, add_generation_prompt=True, **options)
    ids = _ids(tokenizer, text + answer_prefix, special=False)
    return ids[1:] if starts_with_two_bos(tokenizer, ids) else ids


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """Cut a text into pieces of at most `size` characters; joined they are the text again.

    A cut lies after a line end between two words or, in text without one, before a space between two words: common
    tokenizers split there anyway, so the ids stay those of the whole text. Text without either is cut anywhere.
    """
    start = 0
    while len(text) - start > size:
        cut = start + size
        for border in (_LINE, _WORD):
            ends = [match.end() for match in border.finditer(text, start + 1, start + size)]
            if ends:
                cut = ends[-1]
                break
        yield text[start:cut]
        start = cut
    yield text[start:]


def starts_with_two_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> bool:
    """Say whether the first two ids are both BOS: the sink token would be counted wrongly."""
    bos = tokenizer.bos_token_id
    return bos is not None and ids[:2] == [bos, bos]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> list[int]:
    # verbose=False: a piece is no model input, so its length against the model's maximum means nothing.
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]) if text else []


def _specials(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts before and after a text by default."""
    bare = _ids(tokenizer, "a", special=False)
    full = _ids(tokenizer, "a", special=True)
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def _plain(document: Document) -> str:
    if document.messages is None:
        return document.text or ""
    return "\n\n".join(_content(turn.get("content")) for turn in document.messages)


def _content(content: object) -> str:
    """Return the text of one turn: a string, or the text parts of a list of parts."""
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return content if isinstance(content, str) else ""
