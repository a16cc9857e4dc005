"""What ``kvcq serve --engine sglang`` is asked to do. Light to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcq.pipeline.requests import Request


@dataclass(frozen=True, kw_only=True)
class SglangRequest(Request):
    """Serve a model with a bundle through a released SGLang, started and watched as a process.

    Attributes:
        bundle: Bundle, ``NAME.kvcq``.
        model: Hub id, local HuggingFace folder, GGUF file, or a built-in name.
        revision: Hub revision (branch, tag or commit).
        dtype: ``auto`` or ``bfloat16``.
        trust_remote_code: Run model code from the checkpoint's repository.
        host: Address to listen on.
        port: Port, 0 for a free one.
        served_name: Name of the model in requests; None: as SGLang names it.
        max_context: Most tokens of a request; None: the model's context.
        max_running: Requests that run at once: exact rows are reserved for each.
        sink_entries: Distinct beginnings of prompts whose exact rows are kept, 1 or more: prefixes with others are
            computed again. None: as many as `max_running`.
        chat_template: File with a Jinja chat template that replaces the tokenizer's own.
        trace: File that receives a line for each request, with the boundaries of its chunks.
        arguments: Flags for SGLang.
        start_seconds: Longest time until the server answers, weights and graphs included.
        grace: Seconds that running requests have after a signal.
        strict: Refuse a provenance mismatch instead of warning.
    """

    bundle: Path
    model: str
    revision: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None
    max_context: int | None = None
    max_running: int = 64
    sink_entries: int | None = None
    chat_template: Path | None = None
    trace: Path | None = None
    arguments: tuple[str, ...] = ()
    start_seconds: float = 3600.0
    grace: float = 10.0
    strict: bool = False
