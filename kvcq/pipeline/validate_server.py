"""validate --server: ask OpenAI-compatible servers the questions of task files, judge the answers, write the scores."""

from __future__ import annotations

import math
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from kvcq.artifacts.answer_log import AnswerLog
from kvcq.artifacts.scores_file import write_scores
from kvcq.errors import InputError
from kvcq.evaluation.questions import Question, load_questions
from kvcq.evaluation.scoring.score import require_metrics
from kvcq.evaluation.statistics import RESAMPLES
from kvcq.pipeline.asking import all_jobs, continued, find_models, gather_answers
from kvcq.pipeline.event_loop import run_async
from kvcq.pipeline.judging import compare, judge, score_warnings, server_scores, task_files
from kvcq.pipeline.output import exclusive
from kvcq.pipeline.progress import SILENT, Reporter
from kvcq.pipeline.requests import ServerRequest
from kvcq.pipeline.server_client import ServerClient, Wish
from kvcq.pipeline.versions import installed
from kvcq.reports.scores import render_scores, scores_text
from kvcq.spec import canonical
from kvcq.spec.scores import Sampling, ScoresPlan, ScoresReport
from kvcq.version import __version__

RESERVED = frozenset({"model", "messages", "prompt", "seed", "stream", "n", "temperature", "max_tokens"})
UNNAMED = "server"
MAX_SEED = (1 << 53) - 1


@dataclass(frozen=True)
class ServerResult:
    """The scores and where they were written; both None after a dry run."""

    path: Path | None
    report: ScoresReport | None

    def text(self) -> str:
        """Return the scores as a table, or what a dry run found."""
        if self.report is None or self.path is None:
            return "dry run: servers answer and every item can be judged; nothing written"
        return scores_text(self.report) + f"report: {self.path / 'scores.html'}"

    def payload(self) -> dict[str, Any]:
        """Return the whole report for machines."""
        return {
            "path": str(self.path) if self.path else None,
            "report": self.report.plain() if self.report else None,
        }


@exclusive
def validate_server(request: ServerRequest, reporter: Reporter = SILENT) -> ServerResult:
    """Run task files against servers side by side and write the scores.

    Answers are kept beside the output as they come, so an interrupted run continues with `resume`.

    Raises:
        InputError: a bad task file, URL or option; kept answers of another run; code that nobody allowed.
        UnavailableError: a server cannot be reached, or a metric's library is missing.
        EvaluationError: an item got no answer; the line names it. No scores are written.
    """
    questions = load_questions(request.items)
    if request.needles is not None:
        from kvcq.pipeline.server_needles import server_needles  # imports torch

        reporter.stage("making needle questions")
        questions += server_needles(request.needles, reporter)
    if not questions:
        raise InputError("nothing to ask", where="--items", fix="name a task file, or --tasks needle")
    return run_questions(request, questions, reporter)


def run_questions(request: ServerRequest, questions: Sequence[Question], reporter: Reporter) -> ServerResult:
    """Ask and judge questions that are there already; see `validate_server`."""
    started = time.monotonic()
    _check(request, questions)
    require_metrics(questions, allow_code=request.allow_code_execution)
    key = _key(request.api_key_file)
    log = AnswerLog(request.out)
    log.settle(resume=request.resume, force=request.force, dry_run=request.dry_run)

    names = [name or UNNAMED for name, _ in request.servers]
    reporter.stage("reaching the servers")
    # Nothing is lost yet: a server that is not there is told soon.
    models = run_async(
        find_models(_clients(request, names, key, retries=min(1, request.retries)), _wanted(request, names))
    )
    labels = {name: _label(model) for name, model in models.items()}
    if names == [UNNAMED]:
        names = [labels[UNNAMED]]
        models, labels = {names[0]: models[UNNAMED]}, {names[0]: names[0]}
    if request.dry_run:
        return ServerResult(None, None)

    sampling = Sampling(
        api=request.api,
        samples=request.samples,
        temperature=request.temperature,
        max_tokens=request.max_tokens,
        seed=request.seed,
        body=request.body,
    )
    tasks = task_files(questions)
    wishes = {
        name: Wish(model, request.temperature, request.max_tokens, request.body, request.allow_empty)
        for name, model in models.items()
    }
    with continued(log, reporter):
        kept = log.open(ScoresPlan(servers=labels, tasks=tasks, sampling=sampling))
        jobs = all_jobs(names, questions, request.samples)
        clients = _clients(request, names, key, retries=request.retries)
        answers = gather_answers(clients, jobs, wishes, sampling, request.concurrency, log, kept, reporter)
        judged = judge(questions, answers, request.code_timeout, reporter)
    servers = server_scores(labels, tasks, judged, request.samples, request.seed)
    report = ScoresReport(
        sampling=sampling,
        tasks=tasks,
        servers=servers,
        pairs=compare(labels, tasks, judged),
        resamples=RESAMPLES,
        warnings=tuple(score_warnings(servers, judged, request.samples, request.temperature, len(questions))),
        versions=_versions(),
        command=_command(request, names),
    )
    for line in report.warnings:
        reporter.warn(line)
    info: dict[str, Any] = {
        "seconds": round(time.monotonic() - started, 1),
        "urls": {name: url for name, (_, url) in zip(names, request.servers, strict=True)},
        "models": dict(models),
        "resumed": len(kept),
    }
    report = write_scores(request.out, report, judged, render_scores(report), info, force=request.force)
    log.discard()
    return ServerResult(request.out, report)


def _check(request: ServerRequest, questions: Sequence[Question]) -> None:
    names = [name for name, _ in request.servers]
    if len(names) > 1 and (doubles := [name for name, count in Counter(names).items() if count > 1 or not name]):
        what = f"two servers are called {doubles[0]}" if doubles[0] else "several servers need names"
        raise InputError(what, where="--server", fix="write NAME=URL with a name for each")
    if not math.isfinite(request.temperature) or request.temperature < 0:
        raise InputError("not a temperature", where="--temperature", fix="use 0 or a positive number")
    if not 0 <= request.seed <= MAX_SEED:
        raise InputError(f"{request.seed} is no seed", where="--seed", fix=f"use 0 to {MAX_SEED}")
    try:
        canonical.dumps(request.body)
    except (ValueError, TypeError) as error:
        fix = "use JSON as every server reads it: finite numbers, valid Unicode"
        raise InputError(f"not for JSON: {error}", where="--body", fix=fix) from None
    if taken := sorted(RESERVED & set(request.body)):
        raise InputError(f"{taken[0]} is set by kvcq itself", where="--body", fix="leave it out, or use its own option")
    for question in questions:
        if request.api == "completions" and question.row.messages is not None:
            raise InputError("messages need the chat API", where=question.name, fix="give a prompt, or use --api chat")
        if request.api == "chat" and question.tokens is not None:
            raise InputError("prompts of tokens need raw prompts", where=question.name, fix="use --api completions")


def _clients(request: ServerRequest, names: Sequence[str], key: str | None, *, retries: int) -> list[ServerClient]:
    return [
        ServerClient(name, url, api=request.api, seconds=request.timeout, retries=retries, key=key)
        for name, (_, url) in zip(names, request.servers, strict=True)
    ]


def _key(path: Path | None) -> str | None:
    """Return the content of a key file."""
    if path is None:
        return None
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the key: {error}", where="--api-key-file", fix="name a readable file") from None
    if not key or not key.isprintable():
        raise InputError("not a key", where="--api-key-file", fix="write the key alone into the file")
    return key


def _label(model: str) -> str:
    """Return how the report calls a model: servers may name it by its path, of which only the end is recorded."""
    return PurePath(model).name if PurePath(model).is_absolute() else model


def _wanted(request: ServerRequest, names: Sequence[str]) -> dict[str, str]:
    given = dict(request.served_models)
    if unknown := sorted(set(given) - {"", *names}):
        raise InputError(
            f"no server is called {unknown[0]}", where="--served-model", fix=f"servers: {', '.join(names)}"
        )
    return {name: given.get(name, given.get("", "")) for name in names if name in given or "" in given}


def _versions() -> dict[str, str]:
    found = {"kvcq": __version__}
    return found | {name: version for name in ("math-verify",) if (version := installed(name))}


def _command(request: ServerRequest, names: Sequence[str]) -> str:
    """Return the command that repeats the run, without machine paths and addresses."""
    words = ["kvcq validate", *(f"--server {shlex.quote(f'{name}=URL')}" for name in names)]
    words += [f"--items {path.name}" for path in request.items]
    if (needles := request.needles) is not None:
        lengths = ",".join(map(str, needles.needle_lengths or needles.contexts))
        words += ["--tasks needle", f"--model {Path(needles.model).name}", f"--needle-lengths {lengths}"]
        words += [f"--needle-items {needles.needle_items}", f"--haystack {Path(needles.haystack).name}"]
        words += [f"--needle-tasks {','.join(needles.needle_tasks)}"] if needles.needle_tasks else []
        words += [f"--needle-depths {','.join(f'{depth:g}' for depth in needles.needle_depths)}"]
        words += [f"--template {needles.template}"] if needles.template != "auto" else []
        words += [f"--chat-template {needles.chat_template.name}"] if needles.chat_template is not None else []
    words += [f"--samples {request.samples}", f"--temperature {request.temperature:g}", f"--seed {request.seed}"]
    words += [f"--max-tokens {request.max_tokens}"]
    if request.api != "chat":
        words.append(f"--api {request.api}")
    if request.body:
        import json

        words.append(f"--body {shlex.quote(json.dumps(request.body, sort_keys=True))}")
    if request.allow_code_execution:
        words.append(f"--allow-code-execution --code-timeout {request.code_timeout:g}")
    if request.allow_empty:
        words.append("--allow-empty")
    return " ".join(words)
