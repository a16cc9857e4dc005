"""What the numbers of the tasks depend on, in words."""

from __future__ import annotations

from collections.abc import Iterable

from kvcq.reports.summary import candidates
from kvcq.reports.text import clean, context_label, percent, plural
from kvcq.spec.report import Report


def settings(report: Report) -> list[tuple[str, str]]:
    """Return (label, text) of everything that the tasks' numbers depend on besides model, artifacts and text."""
    asked = report.tasks
    if asked is None:
        return []
    # The reference's own rows are rounded to bfloat16 and never coded.
    caches = sorted({row.tasks.cache for row in candidates(report) if row.tasks is not None})
    found = [
        ("Cache", "; ".join([*map(_cache, caches), _prefill(report)])),
        ("Intervals", f"95 %, percentile bootstrap of {asked.resamples:,} resamples; seed {asked.seed} everywhere"),
    ]
    if ppl := asked.perplexity:
        found.append((
            "Perplexity",
            f"{plural(ppl.passages, 'passage')} of {_lengths(ppl.contexts)} tokens, stride {ppl.stride:,}, chunk "
            f"{ppl.chunk:,}; tokens after the first {percent(ppl.score_from)} of a context are scored",
        ))  # fmt: skip
    if needle := asked.needle:
        depths = ", ".join(f"{depth:g}" for depth in needle.depths)
        limits = ", ".join(f"{clean(task)} {limit}" for task, limit in needle.new_tokens.items())
        template = "the model's chat template" if needle.template else "no chat template: the bare text"
        found.append((
            "Needles",
            f"{plural(needle.items, 'item')} of each of {', '.join(map(clean, needle.tasks))}, at each of "
            f"{_lengths(needle.contexts)} tokens, depths {depths} %; haystack {clean(needle.haystack)} (SHA-256 "
            f"{needle.haystack_sha256[:16]}); {template}; chunk {needle.chunk:,}; new tokens at most "
            f"{limits or 'unstated'}",
        ))  # fmt: skip
    if agreement := asked.agreement:
        found.append((
            "Agreement",
            f"{plural(agreement.prompts, 'prompt')} of {_lengths(agreement.contexts)} tokens, {agreement.new_tokens:,} "
            f"greedy tokens each, also past the end of text; chunk {agreement.chunk:,}; a near-tie is within "
            f"{agreement.near_tie:g} nats",
        ))  # fmt: skip
    if decode := asked.decode_kl:
        found.append((
            "Decode KL",
            f"{plural(decode.passages, 'passage')}, {plural(decode.steps, 'single-token step')} after each of "
            f"{_lengths(decode.contexts)} tokens; chunk {decode.chunk:,}",
        ))  # fmt: skip
    return found


def _cache(mode: str) -> str:
    return "packed codes" if mode == "packed" else "simulated by fake quantization"


def _prefill(report: Report) -> str:
    if report.semantics == "by-query":
        return "by-query semantics"
    chunk = f", chunks of {report.chunk:,}" if report.chunk is not None else ""
    cached = f", a prefix of {report.cached_at:,} tokens found in the cache" if report.cached_at is not None else ""
    return f"{report.semantics} semantics{chunk}{cached}"


def _lengths(contexts: Iterable[int]) -> str:
    return ", ".join(map(context_label, contexts))
