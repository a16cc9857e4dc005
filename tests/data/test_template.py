import itertools
import logging
import re
import resource
import signal
import string
import threading

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from kvcq.data import Document, encode, rendering
from kvcq.data.template import chat_prompt, pieces, starts_with_two_bos
from kvcq.errors import InputError

BOS, EOS = 1, 2
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
TALK = Document(messages=[{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "oh, hi"}])


def tokenizer(template=None, *, bos=True, eos=False):
    words = ["<unk>", "<s>", "</s>", *string.printable, "he", "th", "the"]
    merges = [("h", "e"), ("t", "h"), ("th", "e")]
    core = Tokenizer(BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges, unk_token="<unk>"))  # noqa: S106
    core.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in words[:3]])
    core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    single = "<s> " * bos + "$A" + " </s>" * eos
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", BOS), ("</s>", EOS)])
    core.decoder = decoders.Fuse()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    made = PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=64, **special)
    made.chat_template = template
    return made


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (True, True), (False, True), (False, False)])
def test_raw_text_gets_the_tokenizers_own_special_tokens_once(bos, eos):
    tok = tokenizer(bos=bos, eos=eos)
    text = "the other line\n" * 3000
    ids = encode(tok, Document(text=text))
    assert ids == tok(text)["input_ids"]
    assert ids.count(BOS) == bos and ids.count(EOS) == eos


def test_a_rendered_template_is_tokenized_without_special_tokens():
    tok = tokenizer(TEMPLATE)
    ids = encode(tok, TALK)
    assert ids[0] == BOS and ids.count(BOS) == 1
    assert tok.decode(ids) == tok.apply_chat_template(TALK.messages, tokenize=False)


def test_two_bos_are_seen():
    tok = tokenizer()
    assert starts_with_two_bos(tok, encode(tok, Document(text="<s>the")))
    assert not starts_with_two_bos(tok, encode(tok, Document(text="the")))
    tok = tokenizer(bos=False)
    tok.bos_token = None
    assert not starts_with_two_bos(tok, [BOS, BOS])


def test_messages_need_a_template_and_none_is_invented():
    tok = tokenizer()
    with pytest.raises(InputError, match="no chat template") as caught:
        encode(tok, TALK)
    assert "--chat-template FILE" in str(caught.value)
    with_file = encode(tok, TALK, chat_template=TEMPLATE)
    assert with_file == encode(tokenizer(TEMPLATE), TALK)


def test_policies_cross_over():
    tok = tokenizer(TEMPLATE)
    raw = encode(tok, TALK, "raw")
    assert tok.decode(raw, skip_special_tokens=True) == "hello there\n\noh, hi"
    assert tok.decode(encode(tok, Document(text="the"), "chat")) == "<s>[user]the\n"
    parts = Document(
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}, {"role": "x"}]
    )
    assert tok.decode(encode(tok, parts, "raw"), skip_special_tokens=True).strip() == "a"


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{% broken", "{{ messages[9].x }}"]
)
def test_a_template_that_refuses_ends_in_one_line(template):
    with pytest.raises(InputError, match="refuses a conversation") as caught:
        encode(tokenizer(template), TALK)
    assert "\n" not in str(caught.value)


def test_long_texts_print_no_length_warning(caplog):
    with caplog.at_level(logging.WARNING):
        encode(tokenizer(), Document(text="the " * 500))
    assert not caplog.records


@given(st.text(alphabet="ab \n", max_size=400), st.integers(4, 40))
def test_pieces_are_short_and_join_to_the_text(text, size):
    parts = list(pieces(text, size))
    assert "".join(parts) == text
    assert all(len(part) <= size for part in parts)
    assert all(parts[:-1]) or not text


def byte_level():
    """A byte-level tokenizer with merges across white space, the kind that a wrong cut would disturb."""
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(["the\n\n    if x;\n the\n  if\n"] * 50, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core)


@given(st.lists(st.sampled_from(["the", " ", "\n", "    ", "if", ";", "9"]), max_size=120).map("".join))
def test_cuts_do_not_change_the_ids(text):
    parts = list(pieces("the if " + text, 30))
    assume(all(a.endswith("\n") or re.match(r" \S", b) for a, b in itertools.pairwise(parts)))
    assert [i for part in parts for i in BYTE_LEVEL(part)["input_ids"]] == BYTE_LEVEL("the if " + text)["input_ids"]


BYTE_LEVEL = byte_level()


def test_pieces_prefer_line_ends_then_spaces():
    assert list(pieces("one two\nthree four", 10)) == ["one two\n", "three four"]
    assert list(pieces("one two\n\nthree four", 13)) == ["one", " two\n\nthree", " four"]
    assert list(pieces("one two three", 9)) == ["one two", " three"]
    assert list(pieces("abcdefgh", 3)) == ["abc", "def", "gh"]


THINKS = (
    TEMPLATE
    + "{% if add_generation_prompt %}[assistant]{% if not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


def test_a_prompt_ends_where_the_answer_starts_and_holds_one_bos():
    tok = tokenizer(TEMPLATE + "{% if add_generation_prompt %}[assistant]{% endif %}")
    ids = chat_prompt(tok, TALK.messages[:1], answer_prefix="the answer is ")
    assert tok.decode(ids) == "<s>[user]hello there\n[assistant]the answer is "
    assert ids.count(BOS) == 1
    assert chat_prompt(tok, TALK.messages) == encode(tok, TALK) + encode(tok, Document(text="[assistant]"), "raw")[1:]
    twice = "{{ bos_token }}" + tok.chat_template
    assert chat_prompt(tok, TALK.messages, chat_template=twice) == chat_prompt(tok, TALK.messages)


def test_thinking_is_told_only_to_templates_that_ask():
    prompt = [{"role": "user", "content": "hi"}]
    plain = tokenizer(TEMPLATE + "{{ 'told' if enable is defined }}")
    assert "told" not in plain.decode(chat_prompt(plain, prompt))
    tok = tokenizer(THINKS)
    assert tok.decode(chat_prompt(tok, prompt, answer_prefix="oh")) == "<s>[user]hi\n[assistant]<think></think>oh"
    assert tok.decode(chat_prompt(tok, prompt, thinking=True)) == "<s>[user]hi\n[assistant]"


def test_a_prompt_needs_a_template_and_takes_one_from_a_file():
    with pytest.raises(InputError, match="no chat template") as caught:
        chat_prompt(tokenizer(), TALK.messages)
    assert "pass --chat-template FILE" in str(caught.value)
    assert chat_prompt(tokenizer(), TALK.messages, chat_template=THINKS) == chat_prompt(
        tokenizer(THINKS), TALK.messages
    )
    several = tokenizer({"rag": TEMPLATE, "tool_use": TEMPLATE})
    with pytest.raises(InputError, match="no chat template"):
        chat_prompt(several, TALK.messages)
    with pytest.raises(InputError, match="refuses a conversation"):
        chat_prompt(tokenizer(TEMPLATE), [])


ESCAPES = {
    "().__class__": "{{ ().__class__.__mro__[1].__subclasses__() }}",
    "messages[class]": "{{ messages['__class__']['__mro__'] }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "lipsum": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "self": "{{ self.__init__.__globals__ }}",
    "format": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "append": "{{ messages.append(1) }}",
    "namespace": "{% set x = namespace(__class__=1) %}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import '/etc/passwd' as x %}",
}
GREEDY = {
    "one range": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    "nested ranges": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "0.5 s"),
    "power": ("{{ (messages|length + 7) ** 1000000000 }}", "0.5 s"),
    "constant power": ("{{ 7 ** 1000000000 }}", "more than 0.5 s"),
    "multiplied text": ("{{ 'a' * 10**10 }}", "256 MiB"),
    "multiplied at run time": ("{{ ('a' * (messages|length * 10**10))|length }}", "256 MiB"),
    "multiplied list": ("{% set x = [0] * (messages|length * 10**9) %}", "256 MiB"),
    "width": ("{{ '%9999999999d' % 1 }}", "256 MiB"),
    "centre": ("{{ 'a'|center(9999999999) }}", "256 MiB"),
    "doubling": (
        "{% set n = namespace(a='aa') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}", "256 MiB"),
    "much text": ("{{ 'a' * 5000000 }}", "makes 5000000 characters"),
    "recursion": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion depth"),
    "nesting": ("{{ " + "(" * 60000 + "1" + ")" * 60000 + " }}", "recursion depth"),
    "blocks": ("{% if a %}" * 3000 + "{% endif %}" * 3000, "recursion depth"),
    "long reason": ("{{ raise_exception('x' * 10000000) }}", "refuses a conversation, xxx"),
    "long template": ("x" * (2**18 + 1), "has 262145 characters, more than 262144"),
}  # fmt: skip


def refused(template, *, own):
    with pytest.raises(InputError) as caught:
        encode(tokenizer(template if own else TEMPLATE), TALK, chat_template=None if own else template)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500 and caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("own", [True, False], ids=["tokenizer", "file"])
@pytest.mark.parametrize("template", ESCAPES.values(), ids=ESCAPES.keys())
def test_no_template_leaves_the_sandbox(template, own):
    assert re.search("unsafe|no loader|underscore", refused(template, own=own))


@pytest.mark.parametrize(("template", "said"), GREEDY.values(), ids=GREEDY.keys())
def test_no_template_takes_time_or_memory_without_limit(template, said, monkeypatch):
    # On a busy machine another limit than that of time is reached late.
    monkeypatch.setattr(rendering, "RENDER_SECONDS", 0.5 if "0.5 s" in said else 60.0)
    monkeypatch.setattr(rendering, "RENDER_BYTES", 1 << 28)
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    assert said in refused(template, own=True)
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_template_may_repeat_a_long_conversation():
    long = [{"role": "user", "content": "the other line " * 100_000}]
    twice = TEMPLATE + TEMPLATE
    assert len(rendering.render(tokenizer(), long, twice)) > 2 * 1_500_000


def test_templates_render_in_threads_too():
    done = []
    worker = threading.Thread(target=lambda: done.append(encode(tokenizer(TEMPLATE), TALK)))
    worker.start()
    worker.join()
    assert done == [encode(tokenizer(TEMPLATE), TALK)]


def test_a_template_without_end_ends_in_a_thread(monkeypatch):
    monkeypatch.setattr(rendering, "RENDER_SECONDS", 0.3)
    endless = "{% for i in range(9999) %}{% for j in range(9999) %}{{ j }}{% endfor %}{% endfor %}"
    found = []

    def run() -> None:
        try:
            rendering.render(tokenizer(), TALK.messages, endless)
        except InputError as error:
            found.append(str(error))

    worker = threading.Thread(target=run)
    worker.start()
    worker.join(30)
    assert len(found) == 1 and "takes more than 0.3 s" in found[0]


def test_an_alarm_of_the_caller_goes_on():
    former = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 1000.0)
    try:
        encode(tokenizer(TEMPLATE), TALK)
        assert 900 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
