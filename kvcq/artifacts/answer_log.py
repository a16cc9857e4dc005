"""``.NAME.answers``: the answers of a run that is still going on, one a line, beside its output NAME.

Lines are appended and flushed to disk one by one, so a killed run loses only what was on its way. A last line without
its end is dropped.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from kvcq.artifacts.claim import located, sibling
from kvcq.artifacts.disk import disk_errors
from kvcq.artifacts.seal import decode, encode, seal
from kvcq.errors import CorruptArtifactError, InputError
from kvcq.spec import canonical
from kvcq.spec.compare import differences, listed
from kvcq.spec.scores import Answer, AnswerLogHeader, ScoresPlan

DISCARD = "discard the answers: --force"


class AnswerLog:
    """The kept answers of one run.

    Args:
        out: The output of the run.

    Attributes:
        path: Where the answers are kept.
        count: Answers in it, once it is open.
    """

    def __init__(self, out: Path) -> None:
        self.path = sibling(located(out), "answers")
        self.count = 0
        self._file: IO[bytes] | None = None

    def settle(self, *, resume: bool, force: bool, dry_run: bool) -> None:
        """Decide about kept answers before anything else is done: continue, discard, or refuse.

        Raises:
            InputError: there are some, and neither was asked for; or what is there is something else.
        """
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            raise InputError("something that is not kvcq's is in the way", where=self.path, fix="move it away")
        if not self.path.exists() or resume:
            return
        if not force:
            raise InputError(
                "an interrupted run left answers",
                where=self.path,
                fix="continue it with --resume, or discard them with --force",
            )
        if not dry_run:
            self.discard()

    def open(self, plan: ScoresPlan) -> list[Answer]:
        """Begin or continue a run; return the answers that are there already.

        Raises:
            InputError: they belong to another run; names the fields that differ.
            CorruptArtifactError: they are damaged.
            ResourceError: the disk is full.
        """
        with disk_errors(self.path):
            data = self.path.read_bytes() if self.path.exists() else b""
        lines = data.split(b"\n")[:-1]
        kept = [self._answer(line, number) for number, line in enumerate(lines[1:], start=2)]
        if lines:
            self._check_plan(lines[0], plan)
        whole = sum(len(line) + 1 for line in lines)
        with disk_errors(self.path):
            self._file = self.path.open("ab")
            self._file.truncate(whole)
        if not lines:
            self._write(encode(seal(AnswerLogHeader(plan=plan))))
        self.count = len(kept)
        return kept

    def append(self, answer: Answer) -> None:
        """Keep one answer, on disk when this returns.

        Raises:
            ResourceError: the disk is full.
        """
        self._write(canonical.dumps(answer.plain()))
        self.count += 1

    def close(self) -> None:
        """Close the file; what is in it stays."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def discard(self) -> None:
        """Remove the answers: the run is complete, or begins anew."""
        self.close()
        with disk_errors(self.path):
            self.path.unlink(missing_ok=True)

    def _write(self, line: bytes) -> None:
        if self._file is None:
            raise RuntimeError("the log is not open")
        with disk_errors(self.path):
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())

    def _check_plan(self, line: bytes, plan: ScoresPlan) -> None:
        try:
            header = decode(line + b"\n", AnswerLogHeader, f"{self.path}:1")
        except CorruptArtifactError as error:
            raise CorruptArtifactError(error.what, where=error.where, fix=DISCARD) from error
        if found := differences(header.plan.plain(), plan.plain()):
            raise InputError(
                f"the answers are of another run: {listed(found)}",
                where=self.path,
                fix="repeat the interrupted command with --resume, or discard them with --force",
            )

    def _answer(self, line: bytes, number: int) -> Answer:
        try:
            return Answer.model_validate(canonical.loads(line + b"\n"))
        except (ValueError, ValidationError):
            raise CorruptArtifactError("unreadable answer", where=f"{self.path}:{number}", fix=DISCARD) from None
