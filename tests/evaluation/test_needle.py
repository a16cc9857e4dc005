"""Laws of the needle questions: verbatim needles, budget, depth, reproducibility, independence of the pool."""

import re
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcq.errors import InputError
from kvcq.evaluation.haystack import key_words, noise_haystack, refrain_haystack, text_haystack
from kvcq.evaluation.needle import DEPTHS, SUBTASKS, found, make_question, make_questions, place

NEEDLE = re.compile(r"One of the special magic (number|uuid)s for (\S+) is: (\S+)\.")
tasks = st.sampled_from(sorted(SUBTASKS))
depths = st.floats(0, 100)


def encode(message, prefix):
    """Words and punctuation as tokens, and a template around them."""
    words = re.findall(r"\w{1,4}|[^\w\s]", f"user {message} assistant {prefix}")
    return [1, *(hash(word) % 1000 for word in words)]


def question(task="single_2", *, seed=0, row=0, context=900, depth=50.0, text=None):
    text = text or noise_haystack()
    return make_question(task, seed=seed, row=row, context=context, depth=depth, text=text, encode=encode)


def body(made):
    """The text between the introduction and the question."""
    return "\n".join(made.message.split("\n")[1:-1])


@settings(max_examples=40, deadline=None)
@given(tasks, st.integers(0, 5), st.integers(0, 99), st.integers(400, 1500), depths)
def test_prompt_and_answer_fit_and_fill_the_context(task, seed, row, context, depth):
    made = question(task, seed=seed, row=row, context=context, depth=depth)
    used = len(encode(made.message, made.prefix)) + made.new_tokens
    assert tuple(encode(made.message, made.prefix)) == made.tokens
    assert context - 60 <= used <= context


@settings(max_examples=40, deadline=None)
@given(tasks, st.integers(0, 5), st.integers(0, 99), depths)
def test_needles_stand_verbatim_in_the_text_and_are_asked_for(task, seed, row, depth):
    made, kind = question(task, seed=seed, row=row, depth=depth), SUBTASKS[task]
    needles = [(match[2], match[3]) for match in NEEDLE.finditer(body(made))]
    assert len(made.answers) == kind.values * kind.asked
    last = made.message.split("\n")[-1]
    for answer in made.answers:
        (key,) = [key for key, value in needles if value == answer]
        assert key in last and key in made.prefix
        assert f"One of the special magic {kind.kind}s for {key} is: {answer}." in made.message
    assert ("are" in made.prefix.split()) == (len(made.answers) > 1)
    assert all(answer not in made.prefix + last for answer in made.answers)


@settings(max_examples=40, deadline=None)
@given(tasks, st.integers(0, 99))
def test_keys_and_values_of_a_question_are_distinct(task, row):
    needles = [(match[2], match[3]) for match in NEEDLE.finditer(body(question(task, row=row, context=2000)))]
    values = [value for _, value in needles]
    assert len(set(values)) == len(values)
    keys = {key for key, _ in needles}
    assert len(keys) == (1 if task == "multivalue" else len(needles))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["single_1", "single_2", "multikey_1", "multiquery"]), st.integers(0, 99), depths)
def test_the_first_needle_stands_within_one_sentence_of_its_depth(task, row, depth):
    made = question(task, row=row, depth=depth)
    hay = NEEDLE.sub("", body(made))
    at = len(NEEDLE.sub("", body(made)[: body(made).index(f"is: {made.answers[0]}.")]).split("One of the special")[0])
    longest = max(map(len, (noise_haystack() if task != "single_1" else refrain_haystack()).sentences))
    assert abs(at / len(hay) - depth / 100) <= (longest + 8) / len(hay)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), depths)
def test_a_place_is_the_nearest_sentence_end(lengths, depth):
    sentences = ["x" * length for length in lengths]
    ends = [0, *accumulate(lengths)]
    distances = [abs(end - ends[-1] * depth / 100) for end in ends]
    assert distances[place(sentences, depth)] == min(distances)


def test_depth_0_and_100_are_the_ends_of_the_text():
    first, last = body(question(depth=0.0)), body(question(depth=100.0))
    assert NEEDLE.match(first) and NEEDLE.search(last).end() == len(last)


@settings(max_examples=20, deadline=None)
@given(tasks, st.integers(0, 3), st.integers(0, 30))
def test_the_same_seed_gives_the_same_question_and_another_seed_another(task, seed, row):
    made = question(task, seed=seed, row=row)
    assert question(task, seed=seed, row=row) == made
    other = {question(task, seed=seed + 1, row=row).answers, question(task, seed=seed, row=row + 1).answers}
    assert made.answers not in other and len(other) == 2


def test_questions_come_back_on_every_python():
    made = question("multikey_1", seed=3, row=2, context=500, depth=25.0)
    assert made.prefix == "The special magic number for oaken-oasis mentioned in the provided text is"
    assert made.answers == ("1429613",)


def test_pool_size_order_and_other_subtasks_do_not_matter():
    def pool(tasks, contexts, items):
        made = make_questions(tasks, contexts, DEPTHS, items, seed=1, text=noise_haystack(), encode=encode)
        return {(q.task, q.context, q.row): q for q in made}

    small, large = pool(["multivalue"], [600], 2), pool(["single_1", "multivalue"], [600, 700], 7)
    assert len(small) == 2 and len(large) == 28
    assert all(large[name] == made for name, made in small.items())


def test_a_longer_context_hides_the_same_needles():
    short, long = question("multiquery", context=600), question("multiquery", context=1200)
    assert short.answers == long.answers and len(short.tokens) < len(long.tokens)


def test_depths_take_turns_over_rows():
    made = make_questions(["single_2"], [500], (0.0, 50.0, 100.0), 5, seed=0, text=noise_haystack(), encode=encode)
    assert [q.depth for q in made] == [0.0, 50.0, 100.0, 0.0, 50.0]


def test_a_text_of_the_user_is_the_haystack_and_repeats():
    text = text_haystack(
        "essay.txt", "The first line\nbreaks here. Is this the second? It is.\n\nA heading\n\nThe end."
    )
    assert text.sentences == ("The first line breaks here.", "Is this the second?", "It is.", "A heading", "The end.")
    made = body(question("single_2", text=text))
    rest = NEEDLE.sub("", made)
    for sentence in text.sentences:
        rest = rest.replace(sentence, "")
    assert made.count("A heading") > 5 and not rest.strip()
    assert "A heading" not in question("single_1", text=text).message
    assert text.label == "essay.txt" and len(text.sha256) == 64


def test_a_text_without_sentences_is_refused():
    with pytest.raises(InputError, match="no text"):
        text_haystack("blank.txt", " \n\n\t")


def test_a_context_too_short_for_the_question_is_refused_with_the_numbers():
    with pytest.raises(
        InputError, match=r"100 tokens are too few for multiquery: the question takes \d+ and its answer"
    ):
        question("multiquery", context=100)


@pytest.mark.parametrize("options", [{"task": "single_9"}, {"depth": 100.5}, {"depth": -1.0}])
def test_unknown_subtasks_and_depths_are_refused(options):
    with pytest.raises(InputError, match="--needle-"):
        question(**options)


def test_too_many_distinct_keys_are_refused(monkeypatch):
    monkeypatch.setattr("kvcq.evaluation.needle.key_words", lambda: (("able", "big"), ("cat", "dog")))
    with pytest.raises(InputError, match="distinct keys"):
        question("multikey_2", context=4000)


def test_values_are_found_whatever_the_case_and_only_whole():
    assert found("They are 1234567 and 7654321.", ["1234567", "7654321", "1111111"]) == 2
    assert found("ABCD-ef", ["abcd-EF"]) == 1
    assert found("", ["1234567"]) == 0 and found("123456", ["1234567"]) == 0


def test_word_lists_have_no_repeats_and_noise_has_no_digits():
    adjectives, nouns = key_words()
    assert len(set(adjectives + nouns)) == len(adjectives) + len(nouns) and len(adjectives) * len(nouns) > 50_000
    text = " ".join(noise_haystack().sentences + refrain_haystack().sentences)
    assert text.isascii() and not any(char.isdigit() for char in text)
