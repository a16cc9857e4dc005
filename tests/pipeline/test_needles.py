"""Prompts of needle questions: the model's template, its channels, bare text, and what ends an answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcq.errors import InputError
from kvcq.models.load import wrap_model
from kvcq.pipeline.needles import make_needles, open_haystack, stop_tokens
from kvcq.pipeline.requests import ValidateRequest
from tests.tiny import tiny_model, tiny_tokenizer

TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHANNELS = TURNS + "{# <|channel|>final<|message|> #}"


def prompt(chat: str | None, **options: Any) -> tuple[str, Any]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = chat
    request = ValidateRequest(
        artifacts=(), model="m", data=("d",), out=Path("r"), needle_tasks=("single_2",), needle_items=1, **options
    )
    needles = make_needles(request, wrap_model(tiny_model("llama"), tokenizer, "tiny"), (600,))
    (question,) = needles.questions
    return tokenizer.decode(question.tokens), needles


def test_a_chat_template_wraps_the_question_and_the_answer_begins_in_its_turn() -> None:
    text, needles = prompt(TURNS)
    (question,) = needles.questions
    assert needles.template and text == f"<user>{question.message}<assistant>{question.prefix}"


def test_a_template_with_channels_gets_the_answer_in_the_final_one() -> None:
    text, needles = prompt(CHANNELS)
    assert text.endswith(f"<assistant><|channel|>final<|message|>{needles.questions[0].prefix}")


@pytest.mark.parametrize("chat, options", [(None, {}), (TURNS, {"template": "raw"})])
def test_without_a_template_the_prompt_is_the_bare_text(chat: str | None, options: dict[str, Any]) -> None:
    text, needles = prompt(chat, **options)
    (question,) = needles.questions
    assert not needles.template and text.endswith(f"{question.message} {question.prefix}")


def test_a_template_given_as_a_file_is_used(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(TURNS)
    text, needles = prompt(None, chat_template=path)
    assert needles.template and text.startswith("<user>")


def test_a_model_without_a_tokenizer_is_refused() -> None:
    request = ValidateRequest(artifacts=(), model="m", data=("d",), out=Path("r"))
    loaded = wrap_model(tiny_model("llama"), None, "tiny")
    with pytest.raises(InputError, match="no tokenizer"):
        make_needles(request, loaded, (600,))


def test_conversations_are_a_haystack_too(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "Is it warm? It is."}]}\n{"text": "And so on."}\n')
    assert open_haystack(str(path)).sentences == ("Is it warm?", "It is.", "And so on.")


@pytest.mark.parametrize("configured, ends", [(None, {2}), (5, {2, 5}), ([5, 7], {2, 5, 7})])
def test_answers_end_at_every_configured_token(configured: Any, ends: set[int]) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=configured))
    loaded: Any = SimpleNamespace(model=model, tokenizer=SimpleNamespace(eos_token_id=2))
    assert stop_tokens(loaded) == ends
