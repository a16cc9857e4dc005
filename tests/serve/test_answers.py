"""What OpenAI's own client gets."""

from __future__ import annotations

import json

import openai
import pytest

from kvcq.pipeline.requests import ServerRequest
from kvcq.pipeline.validate_server import validate_server
from tests.tiny import tiny_tokenizer


def joined(stream, chat=False):
    parts = list(stream)
    choices = [choice for part in parts for choice in part.choices]
    texts = [(choice.delta.content if chat else choice.text) or "" for choice in choices]
    return "".join(texts), choices, parts


def test_a_stream_is_the_whole_answer_in_parts(served):
    whole = served.complete(max_tokens=20)
    text, choices, parts = joined(served.complete(max_tokens=20, stream=True))
    assert text == whole.choices[0].text and text
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert len({part.id for part in parts}) == 1 and parts[0].object == whole.object == "text_completion"


def test_a_chat_streams_its_turn(served):
    whole = served.chat(max_tokens=12)
    text, choices, parts = joined(served.chat(max_tokens=12, stream=True), chat=True)
    assert whole.choices[0].message.role == choices[0].delta.role == "assistant"
    assert text == whole.choices[0].message.content and whole.object == "chat.completion"
    assert parts[0].object == "chat.completion.chunk"


def test_a_chat_is_the_completion_of_its_template(served, tiny):
    rendered = "<s><|user|>the river</s><|assistant|>"
    ids = served.chat(max_tokens=1).usage.prompt_tokens
    assert (
        served.chat(max_tokens=9).choices[0].message.content
        == served.complete(served_ids(rendered), max_tokens=9).choices[0].text
    )
    assert ids == len(served_ids(rendered))


def served_ids(text):
    return tiny_tokenizer(add_bos=False)(text)["input_ids"]


def test_usage_counts_tokens(served):
    whole = served.complete(max_tokens=7)
    assert (whole.usage.completion_tokens, whole.usage.total_tokens) == (7, whole.usage.prompt_tokens + 7)
    _, _, parts = joined(served.complete(max_tokens=7, stream=True, stream_options={"include_usage": True}))
    assert parts[-1].usage == whole.usage and not parts[-1].choices


def test_prompts_as_texts_and_as_tokens_in_one_request(served):
    ids = [1, *served_ids("the stone")]
    single = [served.complete(prompt, max_tokens=6).choices[0].text for prompt in ("the river", "the stone")]
    assert [choice.text for choice in served.complete(["the river", "the stone"], max_tokens=6).choices] == single
    assert served.complete(ids, max_tokens=6).choices[0].text == single[1]
    assert [choice.text for choice in served.complete([ids, ids], max_tokens=6).choices] == [single[1]] * 2


def test_choices_are_drawn_by_seeds_of_their_own(served):
    options = {"max_tokens": 10, "temperature": 1.0, "seed": 11, "n": 3}
    first = served.complete(**options).choices
    assert [choice.index for choice in first] == [0, 1, 2] and len({choice.text for choice in first}) == 3
    assert [choice.text for choice in served.complete(**options).choices] == [choice.text for choice in first]
    texts = ["", "", ""]
    for part in served.complete(stream=True, **options):
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in first]
    assert served.complete(max_tokens=10, temperature=1.0, seed=12).choices[0].text == texts[1]


def test_top_k_of_one_is_greedy(served):
    drawn = served.complete(max_tokens=10, temperature=1.0, extra_body={"top_k": 1})
    assert drawn.choices[0].text == served.complete(max_tokens=10).choices[0].text


def test_stop_texts_are_cut_off_whole_or_streamed(served):
    text = served.complete(max_tokens=20).choices[0].text
    stop = text[5:8]
    whole = served.complete(max_tokens=20, stop=[stop, "never"])
    assert whole.choices[0].text == text[: text.index(stop)] and whole.choices[0].finish_reason == "stop"
    streamed, choices, _ = joined(served.complete(max_tokens=20, stop=stop, stream=True))
    assert streamed == whole.choices[0].text and choices[-1].finish_reason == "stop"


def test_log_probabilities_of_a_completion(served):
    scores = served.complete(max_tokens=6, logprobs=3).choices[0].logprobs
    text = served.complete(max_tokens=6).choices[0].text
    assert "".join(scores.tokens) == text and len(scores.tokens) == 6
    assert [text[at:].startswith(token) for at, token in zip(scores.text_offset, scores.tokens, strict=True)] == [
        True
    ] * 6
    for token, own, top in zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True):
        assert len(top) <= 3 and top[token] == own == max(top.values()) <= 0


def test_an_echo_scores_the_prompt(served):
    whole = served.complete("the river", max_tokens=2, logprobs=1, echo=True)
    scores = whole.choices[0].logprobs
    assert whole.choices[0].text.startswith("the river")
    assert scores.token_logprobs[0] is None and len(scores.tokens) == whole.usage.prompt_tokens + 2
    only = served.complete("the river", max_tokens=0, logprobs=1, echo=True)
    assert only.choices[0].text == "the river" and only.usage.completion_tokens == 0
    assert only.choices[0].logprobs.token_logprobs == scores.token_logprobs[:-2]
    text, choices, _ = joined(served.complete("the river", max_tokens=2, logprobs=1, echo=True, stream=True))
    assert text == whole.choices[0].text
    parts = [choice.logprobs.token_logprobs for choice in choices if choice.logprobs]
    assert [logprob for part in parts for logprob in part] == scores.token_logprobs


def test_log_probabilities_of_a_chat(served):
    whole = served.chat(max_tokens=5, logprobs=True, top_logprobs=2)
    content = whole.choices[0].logprobs.content
    assert len(content) == 5 and all(len(entry.top_logprobs) == 2 for entry in content)
    assert content[0].logprob == content[0].top_logprobs[0].logprob
    assert bytes(content[0].bytes).decode() == content[0].token
    assert served.chat(max_tokens=5).choices[0].logprobs is None


def test_turns_of_text_parts_and_unknown_fields_pass(served):
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "river"}]
    found = served.chat(parts, max_tokens=4, user="me", store=True, metadata={"a": "b"}, extra_body={"nobody": "knows"})
    assert found.choices[0].message.content == served.chat("the\nriver", max_tokens=4).choices[0].message.content


def test_models_tell_bundle_and_context(served, tiny):
    (model,) = served.client.models.list().data
    manifest = json.loads((tiny.folder / "nova.kvcq" / "kvcq.json").read_text())
    assert model.id == "tiny" and model.max_model_len == 512
    assert model.kvcq["digest"] == manifest["digest"] == served.ready.record["digest"]
    assert served.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("other")
    fingerprint = served.complete(max_tokens=1).system_fingerprint
    assert fingerprint == f"kvcq-{manifest['digest'][:16]}"


def test_health_and_metrics(served):
    assert served.http.get("/health").json()["status"] == "ok"
    assert served.http.get("/ready").status_code == 200
    before = served.metrics()
    served.complete(max_tokens=5)
    served.post(max_tokens=3, stream=True)
    after = served.metrics()

    def grown(name):
        return after[name] - before.get(name, 0)

    assert grown("kvcq_generated_tokens_total") == 8 and grown('kvcq_requests_total{reason="length"}') == 2
    assert grown("kvcq_first_token_seconds_count") == grown("kvcq_request_seconds_count") == 2
    assert after["kvcq_requests_running"] == after["kvcq_cache_bytes"] == after["kvcq_reserved_tokens"] == 0
    assert after["kvcq_canary_statistic"] > 0.7 and after["kvcq_clamped_values_total"] == 0
    assert any(name.startswith("kvcq_bundle_info{") and served.ready.record["digest"] in name for name in after)
    # Of 4 layers and 2 KV heads of 32 channels: 16 bytes of codes and an affine word.
    assert after["kvcq_bytes_per_token"] == 4 * 2 * (16 + 8)
    assert after["kvcq_capacity_tokens"] == served.ready.record["capacity_tokens"] > 512


def test_validate_asks_this_server(served, tmp_path):
    text = served.complete("the river", max_tokens=8).choices[0].text
    items = tmp_path / "task.jsonl"
    rows = [{"metric": "exact", "prompt": "the river", "answers": [answer]} for answer in (text, "no")]
    items.write_text("".join(json.dumps(row | {"id": str(i)}) + "\n" for i, row in enumerate(rows)))
    out = tmp_path / "scores"
    request = ServerRequest(servers=(("", served.url),), items=(items,), out=out, api="completions", max_tokens=8)
    validate_server(request)
    kept = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    assert len(kept) == 2 and text in (out / "answers.jsonl").read_text()
