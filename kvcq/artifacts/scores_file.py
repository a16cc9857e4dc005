"""``report/`` of a server run: scores.json with every answer and a page, and run.json with what must not be sealed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue, ValidationError

from kvcq.artifacts.integrity import Files, open_files
from kvcq.artifacts.kinds import AGAIN, MANIFESTS, require_kind
from kvcq.artifacts.report_file import RUN, RunInfo, text
from kvcq.artifacts.seal import decode, encode, seal
from kvcq.artifacts.store import Staging
from kvcq.errors import CorruptArtifactError, InputError
from kvcq.spec import canonical
from kvcq.spec.scores import JudgedAnswer, ScoresReport

MANIFEST = MANIFESTS["scores"]
ANSWERS, PAGE = "answers.jsonl", "scores.html"
NEAR = 1e-9


@dataclass(frozen=True)
class ScoresArtifact:
    """A server report as read: the scores, every answer and the page."""

    report: ScoresReport
    answers: tuple[JudgedAnswer, ...]
    page: str
    run: dict[str, JsonValue]


def write_scores(
    out: Path,
    report: ScoresReport,
    answers: Sequence[JudgedAnswer],
    html: str,
    run_info: Mapping[str, JsonValue],
    force: bool = False,
) -> ScoresReport:
    """Write a folder of scores and return the report, sealed.

    Args:
        out: Folder to create.
        report: The scores.
        answers: Every answer: by server and task in the order of the report, then by item, then by sample.
        html: The page.
        run_info: JSON values for run.json: times, addresses.
        force: Replace an existing artifact.

    Raises:
        InputError: scores and answers differ; the output exists and `force` is off.
        ResourceError: the disk is full.
    """
    try:
        _check_scores(report, answers, str(out))
    except CorruptArtifactError as error:
        raise InputError(error.what, where=out, fix="nothing was written") from error
    with Staging(out, force=force) as stage:
        files = (
            stage.write(ANSWERS, (canonical.dumps(answer.plain()) for answer in answers)),
            stage.write(PAGE, [html.encode("utf-8")]),
        )
        report = seal(report.model_copy(update={"files": files}))
        stage.write(RUN, [encode(seal(RunInfo(info=dict(run_info))))])
        stage.write(MANIFEST, [encode(report)])
    return report


def read_scores(path: Path) -> ScoresArtifact:
    """Read and check a folder of scores.

    Raises:
        CorruptArtifactError: anything altered, truncated, missing or unlisted, or scores that are not of the answers.
        MismatchError: another format version.
    """
    files = open_files(path)
    require_kind(set(files.sizes), "scores", path)
    return load_scores(files)


def load_scores(files: Files) -> ScoresArtifact:
    """Read and check scores whose files are listed already."""
    where = str(files.path / MANIFEST)
    report = decode(files.load(MANIFEST), ScoresReport, where)
    if [entry.name for entry in report.files] != [ANSWERS, PAGE]:
        raise CorruptArtifactError("the files of the report are not its answers and its page", where=where)
    data = files.load_checked(report.files, unsealed=frozenset({MANIFEST, RUN}))
    run = decode(files.load(RUN), RunInfo, str(files.path / RUN))
    answers = tuple(_answers(data[ANSWERS], files.path / ANSWERS))
    _check_scores(report, answers, where)
    return ScoresArtifact(report, answers, text(data[PAGE], files.path / PAGE), run.info)


def _answers(data: memoryview, path: Path) -> Iterator[JudgedAnswer]:
    for number, line in enumerate(bytes(data).splitlines(keepends=True), start=1):
        try:
            yield JudgedAnswer.model_validate(canonical.loads(line))
        except (ValueError, ValidationError):
            raise CorruptArtifactError("unreadable answer", where=f"{path}:{number}", fix=AGAIN) from None


def _check_scores(report: ScoresReport, answers: Iterable[JudgedAnswer], where: str) -> None:
    """Check that every answer that was asked for is there once, in order, and that scores are their means."""
    given = iter(answers)
    for server in report.servers:
        if [row.task for row in server.tasks] != [task.task for task in report.tasks]:
            raise CorruptArtifactError(f"the tasks of server {server.name!a} are not those of the report", where=where)
        for row, task in zip(server.tasks, report.tasks, strict=True):
            total, items, count = 0.0, set(), task.items * report.sampling.samples
            for index in range(count):
                answer = next(given, None)
                sample = index % report.sampling.samples
                if answer is None or (answer.server, answer.task, answer.sample) != (server.name, task.task, sample):
                    raise CorruptArtifactError(f"answers of {server.name!a} to {task.task!a} are missing", where=where)
                items.add(answer.item)
                total += answer.score
            if len(items) != task.items or row.answers != count or abs(row.score - total / count) > NEAR:
                raise CorruptArtifactError(f"scores of {server.name!a} are not those of its answers", where=where)
    if next(given, None) is not None:
        raise CorruptArtifactError("more answers than were asked for", where=where)
