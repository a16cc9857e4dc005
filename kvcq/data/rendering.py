"""Chat templates are programs of strangers: they run in transformers' sandbox, and here under limits of their own.

The sandbox (jinja2's immutable one, for a tokenizer's template and a user's file alike) keeps a template from Python's
internals and caps ``range``. It caps neither time nor memory: nested loops run for ever, and ``'a' * 10**10`` is one
operation. So a template may be so long, render so much more than it was given, and take so much time and memory.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvcq.errors import InputError

if sys.platform != "win32":
    import resource

if TYPE_CHECKING:
    from types import FrameType

    from transformers import PreTrainedTokenizerBase

# The longest templates in use have about 60 KB.
TEMPLATE_CHARACTERS = 1 << 18
RENDERED_TIMES = 4
RENDERED_CHARACTERS = 1 << 20
RENDER_SECONDS = 10.0
RENDER_BYTES = 1 << 30
_REASON = 300
_STATM = Path("/proc/self/statm")


class _TooSlow(Exception):
    """The time of a template is up."""


def find_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None, fix: str) -> str:
    """Return the Jinja2 text that will be rendered.

    Args:
        tokenizer: The model's tokenizer.
        chat_template: Jinja2 text that replaces the tokenizer's template.
        fix: What to do where there is none.

    Raises:
        InputError: there is none, or it is longer than 256 K characters.
    """
    try:
        template = tokenizer.get_chat_template(chat_template)
    except (ValueError, RuntimeError):  # none, or several of which none is the default
        template = ""
    if not template:
        raise InputError("the tokenizer has no chat template", where=_name(tokenizer), fix=fix)
    if len(template) > TEMPLATE_CHARACTERS:
        what = f"the chat template has {len(template)} characters, more than {TEMPLATE_CHARACTERS}"
        raise InputError(what, where=_name(tokenizer))
    return template


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], template: str, **options: bool) -> str:
    """Render a conversation as text.

    The text may be 4 times as long as the conversation, and 1 M characters, and takes 10 s at most. In the main thread,
    where signals arrive, a single operation is interrupted too, and on Linux 1 GiB beyond the memory in use is the most
    that it takes.

    Args:
        tokenizer: Gives the template its special tokens.
        messages: The turns.
        template: Jinja2 text of `find_template`.
        options: Switches of the template, e.g. ``add_generation_prompt``.

    Raises:
        InputError: the template refuses the conversation, is wrong, touches what it must not, or exceeds a limit.
    """
    try:
        with _limits(RENDER_SECONDS, RENDER_BYTES):
            text = str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options))
    except (_TooSlow, MemoryError) as error:
        limit = f"{RENDER_SECONDS:g} s" if isinstance(error, _TooSlow) else f"{RENDER_BYTES >> 20} MiB"
        raise InputError(
            f"the chat template takes more than {limit} for a conversation", where=_name(tokenizer)
        ) from None
    except Exception as error:  # a template is foreign code: whatever it raises is about this conversation
        reason = " ".join(str(error)[:_REASON].split()) or type(error).__name__
        what = f"the chat template refuses a conversation, {reason}"
        raise InputError(what, where=_name(tokenizer), fix="check the roles and their order") from error
    most = RENDERED_TIMES * len(json.dumps(messages, default=str)) + RENDERED_CHARACTERS
    if len(text) > most:
        what = f"the chat template makes {len(text)} characters of a conversation, more than {most}"
        raise InputError(what, where=_name(tokenizer))
    return text


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return getattr(tokenizer, "name_or_path", "") or "tokenizer"


@contextmanager
def _limits(seconds: float, growth: int) -> Iterator[None]:
    """Interrupt the body after `seconds`, and fail its allocations beyond `growth` more bytes of address space."""
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        with _deadline(seconds):
            yield
        return

    def ring(number: int, frame: FrameType | None) -> NoReturn:
        raise _TooSlow

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    former, timer = signal.signal(signal.SIGALRM, ring), signal.getitimer(signal.ITIMER_REAL)
    try:
        if _STATM.exists():
            size = int(_STATM.read_text().split()[0]) * resource.getpagesize() + growth
            lower = size if soft == resource.RLIM_INFINITY else min(size, soft)
            resource.setrlimit(resource.RLIMIT_AS, (lower, hard))
        # It rings again each second: an exception raised inside a destructor is lost.
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, former)
        signal.setitimer(signal.ITIMER_REAL, *timer)


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Interrupt the body after `seconds`, between two lines of it: signals reach the main thread only."""
    end = time.monotonic() + seconds

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if time.monotonic() > end:
            raise _TooSlow
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(former)
