"""Programs judged by running them: Python tests after the solution, or pairs of input and output."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvcq.evaluation.questions import Case
from kvcq.evaluation.scoring.sandbox import run_program
from kvcq.evaluation.scoring.verdict import Verdict, final_text

_FENCED = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
_PYTHON = ("", "python", "py", "python3")


def code(text: str, prompt: str, tests: str | Sequence[Case], entry_point: str | None, seconds: float) -> Verdict:
    """Score 1 if the program in the text passes all tests.

    The program is the last fenced Python block, or the last that defines `entry_point`; without a fence, the whole
    text. One that lacks the definition of `entry_point` continues the prompt, as in HumanEval with a completion server.

    Args:
        text: The model's answer.
        prompt: What it was asked.
        tests: Python source that raises if the solution is wrong; ``check(entry_point)`` is called after it if it
            defines `check`. Or cases: each is one run as a main program, its output compared line by line without
            white space at line ends.
        entry_point: Name of the function asked for.
        seconds: Wall-clock limit of each run.

    Raises:
        EvaluationError: no process can be started.
    """
    program = solution(text, prompt, entry_point)
    if program is None:
        return Verdict(0.0, False, "no code")
    if isinstance(tests, str):
        call = f"\ncheck({entry_point})\n" if entry_point and _defines(tests, "check") else "\n"
        outcome = run_program(f"{program}\n\n{tests}\n{call}", seconds=seconds)
        early = outcome.exit_code == 0 and not outcome.finished
        return Verdict(float(outcome.finished), note="ended before its tests" if early else outcome.note)
    for number, case in enumerate(tests, start=1):
        outcome = run_program(program, stdin=case.input, main=True, seconds=seconds)
        if outcome.exit_code != 0:
            return Verdict(0.0, note=f"case {number}: {outcome.note}")
        if _lines(outcome.stdout) != _lines(case.output):
            return Verdict(0.0, note=f"case {number}: another output")
    return Verdict(1.0)


def solution(text: str, prompt: str, entry_point: str | None) -> str | None:
    """Return the program of an answer, or None if there is no text."""
    final = final_text(text)
    blocks = [body for language, body in _FENCED.findall(final) if language.lower() in _PYTHON]
    if entry_point:
        blocks = [body for body in blocks if _defines(body, entry_point)] or blocks
    program = blocks[-1] if blocks else final
    if not program.strip():
        return None
    if entry_point and not _defines(program, entry_point) and _defines(prompt, entry_point):
        return prompt + program
    return program


def _defines(source: str, name: str) -> bool:
    """Tell whether source defines a function or class; of a dotted name, its first part."""
    return (
        re.search(rf"^[ \t]*(?:async def|def|class)[ \t]+{re.escape(name.split('.')[0])}\b", source, re.MULTILINE)
        is not None
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
