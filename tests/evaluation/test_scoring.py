from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcq.errors import InputError, UnavailableError
from kvcq.evaluation.questions import Question, Row
from kvcq.evaluation.scoring import maths
from kvcq.evaluation.scoring.choice import choice, named_option
from kvcq.evaluation.scoring.code import solution
from kvcq.evaluation.scoring.maths import math
from kvcq.evaluation.scoring.score import require_metrics, score
from kvcq.evaluation.scoring.text import contains, exact, needles, normalise
from kvcq.evaluation.scoring.verdict import final_text

TEXTS = st.text(max_size=40)
LETTERS = st.sampled_from("ABCD")


@given(TEXTS)
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


@given(TEXTS.filter(str.strip), st.sampled_from(["", " ", "\n", "."]))
def test_an_answer_equals_itself_with_other_case_space_and_end(text: str, end: str) -> None:
    if normalise(text) == normalise(f" {text}{end}"):
        assert exact(f" {text}{end}", [text]).score == 1.0
    assert contains(text, [text]).score == needles(text, [text]).score == 1.0


@pytest.mark.parametrize(
    ("text", "answers", "right"),
    [
        ("Paris.", ["paris"], 1), ("the  Eiffel\nTower", ["The Eiffel Tower"], 1), ("Paris, France", ["Paris"], 0),
        ("**42**", ["42"], 1), ("４２", ["42"], 1), ("ﬁne", ["FINE"], 1), ("?", ["!"], 0), ("", ["x"], 0),
        ("<think>Rome? No.</think> Paris", ["Paris"], 1), ("Rome? No.</think>Paris", ["Paris"], 1),
        ("<think>Paris", ["Paris"], 0), ("b", ["a", "B"], 1),
    ],
)  # fmt: skip
def test_exact_compares_whole_answers(text: str, answers: list[str], right: int) -> None:
    assert exact(text, answers).score == right


@pytest.mark.parametrize(
    ("text", "answers", "any_of", "share"),
    [
        ("It is 7.", ["7"], 1, 1), ("It is 17", ["7"], 0, 1), ("keys 11 and 22", ["11", "22", "33"], 1, 2 / 3),
        ("cats", ["CAT"], 0, 1), ("a C++ compiler", ["C++"], 1, 1), ("<think>7</think> none", ["7"], 0, 0),
        ("NEW york", ["New York", "Boston"], 1, 0.5),
    ],
)  # fmt: skip
def test_contained_answers_are_whole_words_and_needles_are_anywhere(
    text: str, answers: list[str], any_of: int, share: float
) -> None:
    assert contains(text, answers).score == any_of
    assert needles(text, answers).score == pytest.approx(share)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("C", "C"), ("(c)", "C"), ("C.", "C"), ("C) 42", "C"), ("**C**", "C"), ("Option C", "C"), ("choice (b)", "B"),
        ("The answer is (B).", "B"), ("Answer: D", "D"), ("ANSWER: **B**", "B"), ("**Answer: (c)**", "C"),
        ("answer is $\\boxed{B}$", "B"), ("\\boxed{\\text{(D)}}", "D"), ("\\boxed{\\textbf{(A)}}", "A"),
        ("I think A is wrong; option B is correct.", "B"), ("so, the last line\n**(B)**", "B"),
        ("The answer is B, since option A is not correct", "B"), ("A is right-handed, so the answer: C", "C"),
        ("The answer is A. Wait, no. The answer is D.", "D"), ("I would pick (a)", "A"),
        ("<think>the answer is A</think>\nB", "B"), ("thus the colour is\nred.", "A"),
        ("the answer is a number", None), ("A car drives by", None), ("I'm not sure", None), ("", None),
        ("Answer is I don't know", None), ("None of A, B", None), ("Both (A) and (B)", None),
        ("<think>the answer is A", None), ("Answer: E", None), ("(E)", None),
    ],
)  # fmt: skip
def test_the_named_option(text: str, letter: str | None) -> None:
    assert named_option(text, ["red", "blue", "green", "white"]) == letter


@given(LETTERS, LETTERS, st.sampled_from(["The answer is {}.", "Answer: ({})", "\\boxed{{{}}}", "{}", "({}) because"]))
def test_an_answer_that_names_the_letter_is_right_exactly_if_it_is_the_letter(said: str, key: str, form: str) -> None:
    verdict = choice(form.format(said), [key], ["w", "x", "y", "z"])
    assert verdict.found and verdict.score == (said == key)


def test_a_choice_may_be_given_by_its_text_and_none_is_told() -> None:
    assert choice("B", ["blue"], ["red", "blue"]).score == 1
    missing = choice("blueish", ["blue"], ["red", "blue"])
    assert (missing.score, missing.found, missing.note) == (0, False, "no option named")


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("The answer is $\\boxed{204}$.", "204", 1), ("so 0.5", "\\frac{1}{2}", 1), ("\\boxed{1+x^2}", "x^2+1", 1),
        ("\\boxed{(1,2)}", "$(1,2)$", 1), ("$\\{2,1\\}$", "\\{1,2\\}", 1), ("first $1$, then \\boxed{2}", "1", 0),
        ("<think>\\boxed{1}</think> \\boxed{2}", "1", 0), ("12345", "12,345", 1),
    ],
)  # fmt: skip
def test_mathematics_compares_values(text: str, answer: str, right: int) -> None:
    pytest.importorskip("math_verify")
    assert math(text, [answer]).score == right


def test_mathematics_tells_what_it_cannot_read_and_takes_any_answer() -> None:
    pytest.importorskip("math_verify")
    assert not math("I do not know", ["1"]).found
    assert math("\\boxed{3}", ["2", "3"]).score == 1


def test_a_missing_math_library_is_told_before_any_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maths, "find_spec", lambda _: None)
    question = Question("aime", "1", Row(prompt="?", answers=("1",), metric="math"))
    with pytest.raises(UnavailableError, match=r"kvcq\[eval\]") as told:
        require_metrics([question], allow_code=True)
    assert told.value.exit_code == 7


def test_code_runs_only_when_allowed() -> None:
    question = Question("he", "1", Row(prompt="?", tests="assert True", metric="code"))
    with pytest.raises(InputError, match="--allow-code-execution"):
        require_metrics([question], allow_code=False)
    require_metrics([question], allow_code=True)


@pytest.mark.parametrize(
    ("row", "text", "right"),
    [
        (Row(prompt="?", answers=("a",), metric="exact"), "A", 1),
        (Row(prompt="?", answers=("a",), metric="contains"), "it is A!", 1),
        (Row(prompt="?", answers=("a", "b"), metric="needles"), "a", 0.5),
        (Row(prompt="?", answers=("a",), metric="choice"), "(a)", 1),
    ],
)
def test_every_metric_has_its_door(row: Row, text: str, right: float) -> None:
    assert score(Question("t", "1", row), text).score == right


@pytest.mark.parametrize(
    ("text", "prompt", "entry", "program"),
    [
        ("```python\nx = 1\n```", "", None, "x = 1\n"),
        ("first\n```\na = 1\n```\nthen\n```py\nb = 2\n```\n", "", None, "b = 2\n"),
        ("```python\ndef f(): 1\n```\nUsage:\n```python\nf()\n```", "", "f", "def f(): 1\n"),
        ("```bash\nrm x\n```\n```python\ny = 1\n```", "", None, "y = 1\n"),
        ("    return 2 * x\n", "def f(x):\n", "f", "def f(x):\n    return 2 * x\n"),
        ("def f(x): return 1", "def f(x):\n", "f", "def f(x): return 1"),
        ("class Solution:\n    def f(self): pass", "", "Solution.f", "class Solution:\n    def f(self): pass"),
        ("<think>```python\nbad\n```</think>```python\ngood\n```", "", None, "good\n"),
        ("  ", "", None, None),
    ],
)  # fmt: skip
def test_the_program_of_an_answer(text: str, prompt: str, entry: str | None, program: str | None) -> None:
    assert solution(text, prompt, entry) == program


@given(TEXTS, TEXTS)
def test_reasoning_is_never_judged(before: str, after: str) -> None:
    if "think" not in before + after and "<" not in before + after:
        assert final_text(f"<think>{before}</think>{after}") == after
        assert final_text(f"{after}<think>{before}") == after


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("It is 7.", "7", 1),
        ("between 3-7", "7", 1),
        ("(7) or $7, 7%", "7", 1),
        ("1, 7, 9", "7", 1),
        ("it is 17", "7", 0),
        ("7.5", "7", 0),
        ("3,7", "7", 0),
        ("7,000", "7", 0),
        ("7,000 men", "7,000", 1),
        ("x = -7", "7", 0),
        ("x=-7", "-7", 1),
        ("7th", "7", 0),
        ("Parisian", "paris", 0),
    ],
)
def test_a_number_is_contained_as_a_whole(text, answer, right):
    assert contains(text, [answer]).score == right
