from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvcq.runtime.hf.engine.text import REPLACEMENT, Detokenizer, StopText, Transcript


def by_bytes(ids):
    """A tokenizer whose tokens are bytes, decoding as byte-level BPE does."""
    return bytes(ids).decode("utf-8", "replace")


def fallback(ids):
    """Bytes decoded as sentencepiece models do: a run with an unfinished character is replacements altogether."""
    try:
        return bytes(ids).decode("utf-8")
    except UnicodeDecodeError:
        return REPLACEMENT * len(ids)


@pytest.fixture(scope="module")
def byte_level():
    core = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT), max_size=30)


@given(TEXT)
def test_pieces_join_to_the_text_and_hold_no_half_characters(text):
    for decode in (by_bytes, fallback):
        detokenizer = Detokenizer(decode)
        pieces = [detokenizer.add(token) for token in text.encode()]
        assert "".join(pieces) == text
        assert not any(REPLACEMENT in piece for piece in pieces)


@given(TEXT, st.integers(0, 3))
def test_an_unfinished_end_is_left_out(text, cut):
    data = text.encode() + "🦜".encode()[:cut]
    for decode in (by_bytes, fallback):
        detokenizer = Detokenizer(decode)
        assert "".join(detokenizer.add(token) for token in data) == text


def test_pieces_join_to_the_text_of_a_real_byte_level_tokenizer(byte_level):
    text = "naïve 東京 🦜🏽 done"
    ids = byte_level.encode(text)
    detokenizer = Detokenizer(byte_level.decode)
    pieces = [detokenizer.add(token) for token in ids]
    assert "".join(pieces) == text and "" in pieces and not any(REPLACEMENT in piece for piece in pieces)


def test_tokens_without_text_leave_the_context_alone():
    def decode(ids):
        return " ".join(str(token) for token in ids if token)

    detokenizer = Detokenizer(decode)
    assert [detokenizer.add(token) for token in (5, 0, 0, 7, 0, 8)] == ["5", "", "", " 7", "", " 8"]
    assert len(detokenizer._ids) <= 3


def first_complete(text, stops):
    """Where the text ends: before the stop text that is complete first, the longest of those."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


PIECES = st.lists(st.text("abc", max_size=4), max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


@given(PIECES, STOPS)
def test_stop_texts_end_the_text_wherever_tokens_are_cut(pieces, stops):
    stop = StopText(stops)
    out = "".join(stop.add(piece) for piece in pieces)
    whole = "".join(pieces)
    end = first_complete(whole, stops)
    assert stop.found == (end is not None)
    assert out + ("" if stop.found else stop.flush()) == (whole if end is None else whole[:end])


@given(PIECES, STOPS)
def test_text_is_told_only_when_no_stop_text_can_begin_in_it(pieces, stops):
    stop, told = StopText(stops), ""
    for piece in pieces:
        told += stop.add(piece)
    whole = "".join(pieces)
    if not stop.found:
        rest = whole[len(told) :]
        assert not rest or any(other.startswith(rest) for other in stops)


@given(PIECES, STOPS)
def test_tokens_are_told_once_in_order_and_lie_in_the_text(pieces, stops):
    transcript = Transcript(lambda ids: "".join(pieces[token] for token in ids), stops)
    text, tokens = "", []
    for token in range(len(pieces)):
        more, finished = transcript.add(token)
        text += more
        tokens += finished
        if transcript.stopped:
            break
    else:
        more, finished = transcript.finish()
        text += more
        tokens += finished
    assert [token.id for token in tokens] == list(range(len(tokens)))
    assert all(token.offset <= len(text) for token in tokens)
    if not transcript.stopped:
        assert len(tokens) == len(pieces) and text == "".join(pieces)
