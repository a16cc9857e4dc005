import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcq.data import Document, build_corpus
from kvcq.data.sequences import MIN_TOKENS
from kvcq.errors import InputError
from tests.data.test_template import TALK, TEMPLATE, tokenizer


class Letters:
    """One id a character, no special tokens: lets laws be stated in characters."""

    bos_token_id = None
    chat_template = None
    name_or_path = "letters"

    def __init__(self):
        self.seen = 0

    def __call__(self, text, *, add_special_tokens, verbose):
        self.seen += len(text)
        return {"input_ids": [ord(c) for c in text]}


def build(texts, tok=None, **options):
    documents = [text if isinstance(text, Document) else Document(text=text) for text in texts]
    return build_corpus(documents, tok or Letters(), **{"labels": ["x.txt"], "seq_len": 32, **options})


def text_of(sequence):
    return "".join(map(chr, sequence.tokens))


texts = st.lists(st.text(alphabet="abcdefgh", min_size=1, max_size=90), min_size=1, max_size=8)


@settings(max_examples=60)
@given(texts, st.integers(16, 50), st.sampled_from(["on", "isolate", "off"]))
def test_sequences_are_the_text_in_order(parts, seq_len, packing):
    parts = [f"{i}{part}{i:>16}" for i, part in enumerate(parts)]  # no repetition, nothing too short
    corpus = build(parts, packing=packing, seq_len=seq_len)
    joined = "".join(map(text_of, corpus.sequences))
    dropped = len("".join(parts)) - len(joined)
    assert dropped <= (MIN_TOKENS - 1) * (len(parts) if packing == "off" else 1)
    assert packing == "off" or "".join(parts).startswith(joined)
    for sequence in corpus.sequences:
        assert MIN_TOKENS <= len(sequence.tokens) <= seq_len
        ends = [0, *(stop for _, stop in sequence.segments)]
        assert list(sequence.segments) == list(itertools.pairwise(ends)) and ends[-1] == len(sequence.tokens)
        assert all(start < stop for start, stop in sequence.segments)
        assert packing == "isolate" or len(sequence.segments) == 1
        little = sequence.tokens.astype("<i4").tobytes()
        assert sequence.digest == hashlib.sha256(little).hexdigest()
        assert sequence.tokens.dtype == np.int32 and not sequence.tokens.flags.writeable


def test_isolate_keeps_text_borders_across_cuts():
    corpus = build(["a" * 10, "b" * 40, "c" * 14], packing="isolate")
    assert [sequence.segments for sequence in corpus.sequences] == [((0, 10), (10, 32)), ((0, 18), (18, 32))]


def test_isolate_and_on_cut_the_same_tokens():
    parts = [c * n for c, n in zip("abcdef", [5, 70, 1, 33, 31, 20], strict=True)]
    on, isolate = build(parts), build(parts, packing="isolate")
    assert [s.digest for s in on.sequences] == [s.digest for s in isolate.sequences]
    assert on.source.sha256 == isolate.source.sha256


def test_off_never_joins_texts():
    corpus = build(["a" * 20, "b" * 70, "c" * 3], packing="off")
    assert [text_of(s) for s in corpus.sequences] == ["a" * 20, "b" * 32]
    assert corpus.warnings == ["1 repeated sequence counted once", "2 sequences shorter than 16 tokens dropped"]


def test_reading_stops_at_the_wanted_tokens():
    def endless():
        i = 0
        while True:
            i += 1
            yield Document(text=f"{i} " * 40)

    tok = Letters()
    corpus = build_corpus(endless(), tok, labels=[], seq_len=64, num_tokens=1000)
    assert corpus.source.got_tokens == sum(len(s.tokens) for s in corpus.sequences) == 1000
    assert not corpus.warnings and tok.seen < 1200


def test_one_long_text_is_not_tokenized_to_its_end():
    tok = Letters()
    text = "".join(f"line {i}\n" for i in range(100_000))
    build([text], tok, seq_len=512, num_tokens=4096)
    assert tok.seen < 0.05 * len(text)


def test_the_last_sequence_is_lengthened_to_the_minimum():
    corpus = build(["".join(chr(97 + i % 26) for i in range(100))], num_tokens=33)
    assert [len(s.tokens) for s in corpus.sequences] == [32, 16] and not corpus.warnings


def test_too_little_text_warns_with_both_numbers():
    corpus = build(["a" * 20], num_tokens=200)
    assert corpus.warnings == ["the text yields 20 of 200 tokens wanted (10%)"]
    assert (corpus.source.wanted_tokens, corpus.source.got_tokens) == (200, 20)


def test_a_repeated_sequence_counts_once():
    corpus = build(["abcdefgh" * 4] * 5 + ["b" * 32], num_tokens=64)
    assert [text_of(s)[:2] for s in corpus.sequences] == ["ab", "bb"]
    assert corpus.warnings == ["4 repeated sequences counted once"]


def test_nothing_usable_and_bad_lengths_are_refused():
    with pytest.raises(InputError, match="no sequence of at least 16") as caught:
        build(["abc"])
    assert "x.txt" in str(caught.value)
    for options in ({"seq_len": 8}, {"num_tokens": 0}):
        with pytest.raises(InputError, match="too few"):
            build(["a" * 99], **options)


def test_two_bos_warn_once_and_land_in_the_corpus():
    corpus = build([f"<s>the text number {i}" for i in range(4)], tokenizer(), packing="off")
    assert corpus.warnings == ["texts start with two BOS tokens: statistics of the first token are off"]
    assert not build(["the text number one"], tokenizer()).warnings


def test_the_template_that_was_used_is_recorded():
    tok = tokenizer(TEMPLATE)
    assert build([TALK], tok).source.template == "auto: chat"
    assert build([TALK, "some plain text of its own"], tok).source.template == "auto: chat+raw"
    assert build([TALK], tok, template="raw").source.template == "raw"
    own = build([TALK], tok, template="chat", chat_template=TEMPLATE).source.template
    assert own == f"chat, template sha256 {hashlib.sha256(TEMPLATE.encode()).hexdigest()}"


def test_a_change_of_one_token_changes_the_digest():
    one, two = build(["a" * 31 + "b"]), build(["a" * 31 + "c"])
    assert one.source.sha256 != two.source.sha256
