"""How reports write numbers, contexts and foreign text. Everything here is plain text, never markup."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from kvcq.errors import visible

ABSENT = "–"
_ASCII = str.maketrans(
    {
        "×": "x",
        "±": "+-",
        "−": "-",
        "–": "-",
        "—": "-",
        "·": "|",
        "…": "...",
        "≤": "<=",
        "≥": ">=",
        "²": "^2",
        "\u00a0": " ",
    }
)


def clean(text: str) -> str:
    """Make foreign text safe to print on one line: control and direction characters become visible escapes."""
    return visible(text)


def to_ascii(text: str) -> str:
    """Spell a text in ASCII: known signs by look, everything else as an escape."""
    return text.translate(_ASCII).encode("ascii", "backslashreplace").decode()


def number(value: float) -> str:
    """Write a measured number with three significant digits."""
    if value == 0:
        return "0"
    if abs(value) >= 1000 or abs(value) < 0.0005:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    if abs(value) < 0.1:
        return f"{value:.4f}"
    return f"{value:#.3g}".rstrip(".")


def quantity(value: float) -> str:
    """Write a quantity whose whole digits matter, such as a perplexity."""
    if value < 100:
        return f"{value:.2f}"
    return f"{value:,.0f}" if value < 100_000 else number(value)


def factor(value: float) -> str:
    """Write a ratio to a reference: three decimals while it is near one."""
    return f"{value:.3f}×" if value < 10 else f"{quantity(value)}×"


def percent(share: float) -> str:
    """Write a share of one in percent."""
    return f"{100 * share:.1f}%"


def size(count: float) -> str:
    """Write a number of bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def context_label(tokens: int) -> str:
    """Write a context length: 2048 is 2k, 3000 stays 3000."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def ranges(numbers: Iterable[int]) -> str:
    """Write layer ids briefly: 0, 3-5, 9."""
    runs = groupby(enumerate(sorted(set(numbers))), key=lambda pair: pair[1] - pair[0])
    spans = [[value for _, value in run] for _, run in runs]
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)


def plural(count: int, noun: str) -> str:
    """Write a count with its noun: 1 gate, 2 gates."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
