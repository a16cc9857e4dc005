"""The one door to all metrics."""

from __future__ import annotations

from collections.abc import Iterable

from kvcq.errors import InputError
from kvcq.evaluation.questions import Question
from kvcq.evaluation.scoring.choice import choice
from kvcq.evaluation.scoring.code import code
from kvcq.evaluation.scoring.maths import math, require_math
from kvcq.evaluation.scoring.sandbox import require_sandbox
from kvcq.evaluation.scoring.text import contains, exact, needles
from kvcq.evaluation.scoring.verdict import Verdict

CODE_SECONDS = 10.0


def require_metrics(questions: Iterable[Question], *, allow_code: bool) -> None:
    """Refuse before the first question what could not be scored after the last.

    Raises:
        InputError: code would be run, and nobody allowed it.
        UnavailableError: a metric needs a library that is not installed.
    """
    metrics = {question.row.metric for question in questions}
    if "code" in metrics:
        require_sandbox()
        if not allow_code:
            raise InputError(
                "metric code runs what the model writes, limited against accidents but not against hostile code",
                where="--items",
                fix="allow it with --allow-code-execution, best on a machine that holds nothing of value",
            )
    if "math" in metrics:
        require_math()


def score(question: Question, text: str, *, code_seconds: float = CODE_SECONDS) -> Verdict:
    """Judge one answer; metric ``code`` runs it, so ask `require_metrics` first.

    Raises:
        UnavailableError: a library is missing.
        EvaluationError: code cannot be run at all.
    """
    row = question.row
    match row.metric:
        case "exact":
            return exact(text, row.answers)
        case "contains":
            return contains(text, row.answers)
        case "needles":
            return needles(text, row.answers)
        case "choice":
            return choice(text, row.answers, row.choices)
        case "math":
            return math(text, row.answers)
        case "code":
            prompt = row.prompt if row.prompt is not None else ""
            return code(text, prompt, row.tests, row.entry_point, code_seconds)
