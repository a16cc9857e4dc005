"""Asking needle questions: a copying runner finds all, failures stop everything, cells and pairs add up."""

import pytest
import torch

from kvcq.errors import EvaluationError, ResourceError
from kvcq.evaluation.needle import Question
from kvcq.evaluation.retrieval import ask, needle_pairs, needle_score
from kvcq.evaluation.session import Chunking
from tests.evaluation.sessions import quiet

STOP = 99
CHUNKS = Chunking(4)


class Scripted:
    """Answers with the tokens of a script, then stops; `fault` runs before each forward."""

    def __init__(self, name, script, fault=lambda length: None):
        self.name, self.script, self.fault = name, script, fault

    def start(self, prompt):
        self.length, self.prompt = 0, prompt
        return self

    def extend(self, tokens, keep=1):
        self.fault(self.length)
        self.length += len(tokens)
        at = max(self.length - self.prompt, 0)
        logits = torch.zeros(min(keep, len(tokens)), 100)
        logits[-1, self.script[at] if at < len(self.script) else STOP] = 1.0
        return logits


def decode(tokens):
    return " ".join(map(str, tokens))


def question(row=0, *, task="single_2", context=32, depth=0.0, answers=("7", "8"), new_tokens=6):
    return Question(task, row, context, depth, "", "", answers, tuple(range(1, 11)), new_tokens)


def asked(runners, questions):
    return ask(runners, questions, decode=decode, stop={STOP}, chunking=CHUNKS, progress=quiet)


def test_answers_score_the_share_of_needles_and_stop_at_the_end_of_text():
    both, one, none = asked(
        [Scripted("both", [5, 7, 8]), Scripted("one", [7]), Scripted("none", [])], [question(0), question(1)]
    )
    assert [(entry.found, entry.asked, entry.new_tokens, entry.truncated) for entry in both] == [(2, 2, 3, False)] * 2
    assert [entry.found for entry in one] == [1, 1] and [entry.new_tokens for entry in none] == [0, 0]
    score = needle_score(one)
    assert (score.score, score.exact, score.truncated, score.errors) == (0.5, 0.0, 0, 0)
    assert needle_score(both).interval.low == needle_score(both).exact == 1.0


def test_an_answer_cut_by_the_limit_is_counted():
    (items,) = asked([Scripted("talks", [1] * 50)], [question(new_tokens=4), question(1, new_tokens=2)])
    assert [(entry.new_tokens, entry.truncated) for entry in items] == [(4, True), (2, True)]
    assert needle_score(items).truncated == 2


def test_a_limit_of_answers_needs_one_forward_less_than_tokens():
    lengths = []
    asked([Scripted("talks", [1] * 50, lengths.append)], [question(new_tokens=4)])
    assert lengths == [0, 4, 8, 10, 11, 12]


def test_cells_group_by_context_depth_and_subtask():
    questions = [
        question(row, task=task, context=context, depth=depth)
        for context in (64, 32)
        for task in ("single_2", "single_1")
        for row, depth in enumerate((0.0, 50.0, 0.0))
    ]
    (items,) = asked([Scripted("one", [7])], questions)
    score = needle_score(items)
    assert [(c.context, c.depth, c.task, c.items) for c in score.cells] == [
        (context, depth, task, items)
        for context in (32, 64)
        for depth, items in ((0.0, 2), (50.0, 1))
        for task in ("single_1", "single_2")
    ]
    assert [(entry.context, entry.items, entry.score) for entry in score.lengths] == [(32, 6, 0.5), (64, 6, 0.5)]
    assert sum(cell.items for cell in score.cells) == len(score.items) == 12


def test_pairs_compare_all_needles_found():
    questions = [question(row, answers=("7",) if row else ("7", "8")) for row in range(3)]
    first, second = asked([Scripted("a", [7]), Scripted("b", [8])], questions)
    (pair,) = needle_pairs([("a", first), ("b", second)])
    assert (pair.task, pair.first, pair.second, pair.items) == ("needle", "a", "b", 3)
    assert (pair.only_first, pair.only_second, pair.p_value) == (2, 0, 0.5)


def explode(length):
    if length == 8:
        raise RuntimeError("kernel\nfell over")


def test_an_item_that_raises_stops_everything_and_is_named():
    with pytest.raises(EvaluationError) as caught:
        asked([Scripted("good", [7]), Scripted("bad", [7], explode)], [question(3)])
    line = "the item failed to run, RuntimeError: kernel fell over (needle single_2, context 32, row 3, bad)"
    assert str(caught.value).startswith(line) and caught.value.exit_code == 1


def test_logits_that_are_not_finite_stop_everything():
    class Broken(Scripted):
        def extend(self, tokens, keep=1):
            return super().extend(tokens, keep) * float("nan" if self.length > 10 else 1)

    with pytest.raises(EvaluationError, match=r"not finite \(needle single_2, context 32, row 0, nan, position 10\)"):
        asked([Broken("nan", [7])], [question()])


def test_lack_of_memory_stays_what_it_is():
    def full(length):
        raise ResourceError("out of memory")

    with pytest.raises(ResourceError):
        asked([Scripted("big", [], full)], [question()])
