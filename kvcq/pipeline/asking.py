"""Asks every question of every server, keeps each answer at once, and stops at the first that cannot be had."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace

from kvcq.artifacts.answer_log import AnswerLog
from kvcq.errors import InputError, Interrupted, KvcqError
from kvcq.evaluation.questions import Question
from kvcq.pipeline.event_loop import run_async
from kvcq.pipeline.progress import Reporter
from kvcq.pipeline.server_client import Prompt, ServerClient, Wish
from kvcq.spec.scores import Answer, Sampling

CONTINUE = "answers so far are kept, run the same command with --resume"


@dataclass(frozen=True)
class Job:
    """One answer that is wanted."""

    server: str
    question: Question
    sample: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What tells it from all others."""
        return self.server, self.question.task, self.question.id, self.sample


def key_of(answer: Answer) -> tuple[str, str, str, int]:
    """Return the key of the job that an answer belongs to."""
    return answer.server, answer.task, answer.item, answer.sample


def all_jobs(servers: Sequence[str], questions: Sequence[Question], samples: int) -> list[Job]:
    """Return every job: by server, then by question, then by sample."""
    return [Job(server, question, sample) for server in servers for question in questions for sample in range(samples)]


def prompt_of(question: Question) -> Prompt:
    """Return what is sent for a question."""
    if question.tokens is not None:
        return question.tokens
    if question.row.messages is not None:
        return tuple(message.plain() for message in question.row.messages)
    return question.row.prompt or ""


async def find_models(clients: Sequence[ServerClient], wanted: Mapping[str, str]) -> dict[str, str]:
    """Return the model to ask for at each server, by server name.

    Args:
        clients: The servers.
        wanted: Model names given by the user, by server name.

    Raises:
        InputError: a server does not serve the model, or serves several and none was named.
        UnavailableError: a server does not answer.
    """
    found = {}
    for client in clients:
        served, own = await client.models(), wanted.get(client.name)
        # Aliases need not be listed, so a name that is missing is refused only by the server.
        if own is None and len(served) != 1:
            listed = f"serves {', '.join(served[:8])}" if served else "does not list its models"
            raise InputError(f"server {client.name} {listed}", where="--server", fix="name one with --served-model")
        found[client.name] = served[0] if own is None else own
    return found


async def ask_all(
    clients: Sequence[ServerClient],
    jobs: Sequence[Job],
    wishes: Mapping[str, Wish],
    sampling: Sampling,
    concurrency: int,
    keep: Callable[[Answer], None],
) -> None:
    """Ask for all jobs, `concurrency` at a time and server, and hand each answer to `keep`.

    Raises:
        EvaluationError, UnavailableError: the first job that failed; the others are cancelled.
    """

    async def work(client: ServerClient, own: Iterator[Job]) -> None:
        for job in own:
            name = f"{job.question.name}, sample {job.sample}"
            prompt = prompt_of(job.question)
            wish = wishes[client.name]
            if job.question.max_tokens is not None:
                wish = replace(wish, max_tokens=job.question.max_tokens)
            reply = await client.ask(prompt, sampling.seed + job.sample, wish, name)
            keep(
                Answer(
                    server=client.name,
                    task=job.question.task,
                    item=job.question.id,
                    sample=job.sample,
                    text=reply.text,
                    truncated=reply.truncated,
                    prompt_tokens=reply.prompt_tokens,
                    completion_tokens=reply.completion_tokens,
                )
            )

    try:
        async with asyncio.TaskGroup() as group:
            for client in clients:
                own = iter([job for job in jobs if job.server == client.name])
                for _ in range(concurrency):
                    group.create_task(work(client, own))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def gather_answers(
    clients: Sequence[ServerClient],
    jobs: Sequence[Job],
    wishes: Mapping[str, Wish],
    sampling: Sampling,
    concurrency: int,
    log: AnswerLog,
    kept: Sequence[Answer],
    reporter: Reporter,
) -> list[Answer]:
    """Return the answers to all jobs in their order; those in `kept` are not asked for again.

    Raises:
        EvaluationError, UnavailableError: see `ask_all`; what was answered stays in `log`.
    """
    answers = {key_of(answer): answer for answer in kept}
    missing = [job for job in jobs if job.key not in answers]

    def keep(answer: Answer) -> None:
        log.append(answer)
        answers[key_of(answer)] = answer
        reporter.advance(len(answers), len(jobs), "answers")

    async def run() -> None:
        async with AsyncExitStack() as open_clients:
            for client in clients:
                await open_clients.enter_async_context(client)
            await ask_all(clients, missing, wishes, sampling, concurrency, keep)

    reporter.stage(f"asking for {len(missing)} answers" + (f", {len(kept)} are there" if kept else ""))
    run_async(run())
    return [answers[job.key] for job in jobs]


@contextmanager
def continued(log: AnswerLog, reporter: Reporter) -> Iterator[None]:
    """Close the log at the end; when the block fails or a signal ends it, say how to continue with what is kept.

    Raises:
        Interrupted, KeyboardInterrupt: as they came, with a note.
    """
    try:
        yield
    except (KeyboardInterrupt, Interrupted) as stop:
        stop.add_note(CONTINUE)
        raise
    except KvcqError:
        if log.count:
            reporter.note(CONTINUE)
        raise
    finally:
        log.close()
