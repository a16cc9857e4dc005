"""The template environment: packaged templates only, escaping on, unknown names refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kvcq.reports.text import clean, context_label, percent, size


@cache
def environment() -> Environment:
    """Return the environment for the templates beside this file."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(clean=clean, context=context_label, percent=percent, size=size)
    return made
