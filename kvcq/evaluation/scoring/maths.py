r"""Mathematics through the library math-verify: 1/2, 0.5 and ``\frac{1}{2}`` are one answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec

from kvcq.errors import UnavailableError
from kvcq.evaluation.scoring.verdict import Verdict, final_text


def require_math() -> None:
    """Refuse before the first question what could not be scored after the last.

    Raises:
        UnavailableError: math-verify is not installed.
    """
    if find_spec("math_verify") is None:
        raise UnavailableError("metric math needs math-verify", where="--items", fix="pip install 'kvcq[eval]'")


def math(text: str, answers: Sequence[str]) -> Verdict:
    r"""Score 1 if the last expression of the text equals one of the answers; boxed ones come first.

    Answers are numbers or LaTeX, with or without ``$`` or ``\boxed``. Comparison has time limits of a few seconds,
    kept by a signal: call it from the main thread. An answer that cannot be compared in time is wrong.

    Raises:
        UnavailableError: math-verify is not installed.
    """
    require_math()
    from math_verify import parse, verify

    # It reports its own time limits through logging, which nobody configured.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    given = parse(final_text(text))
    if not given:
        return Verdict(0.0, False, "no expression found")
    return Verdict(float(any(verify(parse(_gold(answer)), given) for answer in answers)))


def _gold(answer: str) -> str:
    """Return a reference answer in a form that is parsed as LaTeX."""
    return answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"
