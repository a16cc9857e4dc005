"""What a request asks of the model-level tasks, checked before anything is measured."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvcq.codecs.windows import oldest_served
from kvcq.errors import SHOWN, InputError, shown
from kvcq.evaluation.agreement import NEAR_TIE
from kvcq.evaluation.attention import check_context
from kvcq.evaluation.gates import REFERENCE, Gate
from kvcq.evaluation.needle import SUBTASKS
from kvcq.evaluation.perplexity import SCORE_FROM
from kvcq.evaluation.session import Chunking
from kvcq.evaluation.statistics import RESAMPLES
from kvcq.pipeline.needles import Needles
from kvcq.pipeline.requests import ValidateRequest
from kvcq.spec.boundary import served_boundaries
from kvcq.spec.plan import Windows
from kvcq.spec.tasks import (
    AgreementSettings,
    DecodeKLSettings,
    NeedleSettings,
    PerplexitySettings,
    TaskSettings,
)

TASKS = ("attention", "perplexity", "needle", "agreement", "decode-kl")

Contexts = Mapping[str, tuple[int, ...]]
"""Context lengths by task, ascending; tasks that do not run are absent."""


class Windowed(Protocol):
    """Whatever keeps windows exact, under a name."""

    @property
    def name(self) -> str:
        """Of the artifact."""

    @property
    def windows(self) -> Windows:
        """Its windows."""


def task_contexts(request: ValidateRequest) -> Contexts:
    """Return which tasks run at which contexts, in the order of `TASKS`.

    Raises:
        InputError: an unknown task, subtask, semantics or cache, a bad number, or a pair that measures nothing.
    """
    _known(request.tasks, TASKS, "--tasks")
    _known(request.needle_tasks or (), tuple(SUBTASKS), "--needle-tasks")
    _known((request.semantics,), ("by-query", "served", "deferred"), "--semantics")
    _known((request.cache,), ("auto", "packed", "simulate"), "--cache")
    if not request.tasks or not request.contexts or request.needle_tasks == () or not request.needle_depths:
        raise InputError("nothing to measure", where="--tasks", fix=f"name one of {', '.join(TASKS)}")
    numbers = {"--chunk": request.chunk, "--needle-items": request.needle_items}
    numbers |= {"--new-tokens": request.new_tokens, "--decode-steps": request.decode_steps}
    for flag, value in numbers.items():
        if value < 1:
            raise InputError(f"{value} is too small", where=flag, fix="use at least 1")
    for depth in request.needle_depths:
        if not 0 <= depth <= 100:
            raise InputError(f"{depth:g} is no percentage", where="--needle-depths", fix="use 0 to 100")
    if "perplexity" in request.tasks and request.semantics == "deferred":
        raise InputError(
            "perplexity reads prefills, which deferred quantization leaves exact",
            where="--semantics",
            fix="leave out perplexity, or measure agreement and decode-kl",
        )
    if request.semantics == "deferred" and request.cache == "packed":
        raise InputError(
            "a deferred prefill needs exact rows that pages do not keep", where="--cache", fix="use simulate or auto"
        )
    contexts = tuple(sorted(set(request.contexts)))
    lengths = tuple(sorted(set(request.needle_lengths or contexts)))
    return {task: lengths if task == "needle" else contexts for task in TASKS if task in request.tasks}


def check_windows(request: ValidateRequest, contexts: Contexts, subjects: Sequence[Windowed]) -> None:
    """Refuse contexts in which nothing would be read from codes.

    Raises:
        InputError: a context within the windows, within one chunk, or not beyond the cached prefix.
    """
    for task, lengths in contexts.items():
        flag = "--needle-lengths" if task == "needle" and request.needle_lengths else "--contexts"
        for subject in subjects:
            check_context(lengths[0], subject.windows, flag)
        if request.semantics != "served":
            continue
        if request.cached_at is not None and not 0 < request.cached_at < lengths[0] - 1:
            raise InputError(
                f"a prefix of {request.cached_at} tokens leaves nothing of a context of {lengths[0]}",
                where="--cached-at",
                fix="use a smaller one",
            )
        if task not in ("attention", "perplexity"):
            continue
        boundaries = served_boundaries(lengths[0], request.chunk, request.cached_at)
        for subject in subjects:
            if int(oldest_served(lengths[0], boundaries, subject.windows)[-1]) <= subject.windows.sink:
                raise InputError(
                    f"nothing was quantized in this run: a context of {lengths[0]} tokens is read in chunks of "
                    f"{request.chunk}, and {subject.name} keeps {subject.windows.recent} rows before each exact",
                    where="--chunk",
                    fix="use smaller chunks or longer contexts",
                )
    if request.cached_at is not None and request.semantics != "served":
        raise InputError("only a served prefill has a cached prefix", where="--cached-at", fix="add --semantics served")


def needle_asked(request: ValidateRequest, name: str) -> bool:
    """Return True when an artifact, or the reference, is asked for needles."""
    return name == REFERENCE or request.needle_artifacts is None or name in request.needle_artifacts


def check_asked(request: ValidateRequest, names: Sequence[str], gates: Sequence[Gate]) -> None:
    """Refuse needles for artifacts that are not there, and gates on needles that some would not be asked for.

    Raises:
        InputError: names the flag and the artifact.
    """
    if request.needle_artifacts is None:
        return
    _known(request.needle_artifacts, names, "--needle-artifacts")
    for gate in gates:
        for name in gate.artifacts or names:
            if gate.metric.startswith("needle") and not needle_asked(request, name):
                raise InputError(
                    f"the gate on {gate.metric} judges {name}, which is not asked for needles",
                    where="--gates",
                    fix="name it in --needle-artifacts, or name the gate's artifacts",
                )


def check_positions(request: ValidateRequest, contexts: Contexts, longest: int | None) -> None:
    """Refuse answers that reach beyond the `longest` context that the model was made for.

    Contexts themselves are checked where the text is cut into passages.

    Raises:
        InputError: names the flag and both numbers.
    """
    more = {"needle": 0, "agreement": request.new_tokens, "decode-kl": request.decode_steps}
    for task in more.keys() & contexts.keys():
        needed = contexts[task][-1] + more[task]
        if longest is not None and needed > longest:
            raise InputError(
                f"the model's context is {longest} tokens, {task} takes {needed}",
                where="--needle-lengths" if task == "needle" and request.needle_lengths else "--contexts",
                fix="use a shorter one",
            )


def chunking_of(request: ValidateRequest) -> Chunking:
    """Return how the request's prompts are cut into forwards."""
    return Chunking(request.chunk, request.cached_at if request.semantics == "served" else None)


def settings_of(request: ValidateRequest, contexts: Contexts, needles: Needles | None) -> TaskSettings | None:
    """Return the record of everything that the scores depend on, None when only attention is measured."""
    if set(contexts) == {"attention"}:
        return None
    chunk, passages = request.chunk, request.passages
    perplexity = needle = agreement = decode = None
    if found := contexts.get("perplexity"):
        perplexity = PerplexitySettings(
            contexts=found, passages=passages, chunk=chunk, stride=found[-1], score_from=SCORE_FROM
        )
    if needles is not None:
        needle = NeedleSettings(
            tasks=request.needle_tasks or tuple(SUBTASKS),
            contexts=contexts["needle"],
            depths=request.needle_depths,
            items=request.needle_items,
            haystack=needles.haystack.label,
            haystack_sha256=needles.haystack.sha256,
            template=needles.template,
            chunk=chunk,
            new_tokens={task: SUBTASKS[task].new_tokens for task in request.needle_tasks or SUBTASKS},
        )
    if found := contexts.get("agreement"):
        agreement = AgreementSettings(
            contexts=found, prompts=passages, new_tokens=request.new_tokens, chunk=chunk, near_tie=NEAR_TIE
        )
    if found := contexts.get("decode-kl"):
        decode = DecodeKLSettings(contexts=found, passages=passages, steps=request.decode_steps, chunk=chunk)
    return TaskSettings(
        seed=request.seed,
        resamples=RESAMPLES,
        perplexity=perplexity,
        needle=needle,
        agreement=agreement,
        decode_kl=decode,
    )


def _known(names: Sequence[str], known: Sequence[str], flag: str) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name)[:SHOWN], known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InputError(f"{shown(name)} is not known", where=flag, fix=f"{hint}known: {', '.join(known)}")
