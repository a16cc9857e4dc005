r"""Multiple choice: which letter an answer names.

The rule, first match decides; letters beyond the options never match:

1. ``\boxed{C}``: the last one.
2. ``answer is C``, ``answer: (C)``, ``option C is correct``, ``choose C``: the last such statement. A letter counts if
   it is upper case or in brackets, so that "the answer is a number" names nothing.
3. The answer begins with a letter that stands alone: ``C``, ``(C) because``, ``C. because``, ``**C**``, ``Option C``.
4. The last line is one of the option texts, normalised.
5. Exactly one letter in brackets or bold in the last line.

Anything else names no option: wrong, and counted as not found.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvcq.evaluation.questions import MAX_CHOICES, option_letter
from kvcq.evaluation.scoring.text import normalise
from kvcq.evaluation.scoring.verdict import Verdict, final_text

# A letter that stands alone, as people mark options: C, (C), [C], **C**, \text{C}, "C".
_OPEN, _CLOSE = r"(?:[*_`\"'$]|\\text\{|\\mathrm\{)*", r"(?:[*_`\"'$}])*"
_BRACKETED = rf"{_OPEN}[(\[]{_OPEN}(?P<b>[A-Za-z]){_CLOSE}[)\]]"
_PLAIN = rf"{_OPEN}(?P<p>[A-Z]){_CLOSE}(?![\w'’])"
_LETTER = rf"(?:{_BRACKETED}|{_PLAIN})"

_BOXED = re.compile(r"\\boxed\s*\{\s*(?:\\text\s*\{|\\mathrm\s*\{|\\textbf\s*\{)?\s*[(\[]?([A-Za-z])[)\]]?[\s.}]*\}")
_STATED = (
    re.compile(
        rf"\b(?i:answer|(?:correct|right|best|final) (?:choice|option))\b{_CLOSE}\s*"
        r"(?i:is|should be|would be|must be|will be)?\s*[:=]?\s*"
        rf"{_CLOSE}\s*(?i:option|choice|letter)?\s*{_LETTER}"
    ),
    re.compile(rf"\b(?i:choose|select|pick)\s+(?i:option|choice|answer)?\s*{_LETTER}"),
    re.compile(rf"(?<![\w'’]){_LETTER}\s+(?i:is (?:the )?(?:correct|right|best))(?![\w-])"),
)
_FIRST = re.compile(
    rf"(?i:option |choice )?{_OPEN}"
    rf"(?:[(\[]{_OPEN}(?P<b>[A-Za-z]){_CLOSE}[)\]]|(?P<p>[A-Z]){_CLOSE}(?=[).:,]|\s*$|\s*\n))"
)
_MARKED = re.compile(r"\(([A-Z])\)|\[([A-Z])\]|\*\*\(?([A-Z])\)?[.)]?\*\*")


def choice(text: str, answers: Sequence[str], choices: Sequence[str]) -> Verdict:
    """Score 1 if the option that the text names is one of the answers (letters, or texts of choices)."""
    named = named_option(text, choices)
    right = {option_letter(answer, choices) for answer in answers}
    return Verdict(float(named in right), named is not None, "" if named else "no option named")


def named_option(text: str, choices: Sequence[str] = ()) -> str | None:
    """Return the letter that an answer names by the rule of the module, or None."""
    final = final_text(text).strip()
    allowed = {chr(ord("A") + index) for index in range(len(choices) or MAX_CHOICES)}
    lines = [line for line in final.splitlines() if line.strip()]
    if not lines:
        return None
    stated = [(m.start(), m["b"] or m["p"]) for pattern in _STATED for m in pattern.finditer(final)]
    candidates: list[str] = [m[1] for m in _BOXED.finditer(final)][-1:]
    candidates += [letter for _, letter in sorted(stated) if letter.upper() in allowed][-1:]
    if first := _FIRST.match(final):
        candidates.append(first["b"] or first["p"])
    texts = [normalise(option) for option in choices]
    if texts.count(normalise(lines[-1])) == 1:
        candidates.append(chr(ord("A") + texts.index(normalise(lines[-1]))))
    marked = {"".join(filter(None, m.groups())) for m in _MARKED.finditer(lines[-1])} & allowed
    candidates += marked if len(marked) == 1 else ()
    return next((letter.upper() for letter in candidates if letter.upper() in allowed), None)
