"""The checkpoint of a running collection: when it is written, who may continue it, when it goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcq.artifacts.checkpoint_file import checkpoint_path, read_checkpoint, remove_checkpoint, write_checkpoint
from kvcq.capture.collect import Capture
from kvcq.errors import InputError, Interrupted, KvcqError
from kvcq.pipeline.progress import Reporter
from kvcq.spec.checkpoint import CheckpointHeader
from kvcq.spec.compare import differences, listed
from kvcq.spec.header import StatsHeader
from kvcq.stats.part import StatsPart

# Pauses are at least this many times as long as the last checkpoint took, unless every sequence was asked for.
COST = 20
CONTINUE = "what is finished is kept, run the same command with --resume"
# What a run finds out only at its end, and words that do not decide a number.
OPEN_FIELDS = frozenset({"warnings", "files", "digest"})


class Checkpoint:
    """Keeps the state of one collection beside its output.

    Args:
        out: The output.
        every: Seconds between two checkpoints, 0 for one after each sequence, None for none at all.
        reporter: Is told when a checkpoint cannot be written.
    """

    def __init__(self, out: Path, every: float | None, reporter: Reporter) -> None:
        self.path = checkpoint_path(out)
        self._every = every
        self._reporter = reporter
        self._last = time.monotonic()
        self._cost = 0.0
        self._header: CheckpointHeader | None = None
        self._saved: frozenset[str] = frozenset()

    def settle(self, *, resume: bool, force: bool, dry_run: bool) -> None:
        """Decide about a checkpoint that is there before anything else is done: continue, discard, or refuse.

        Raises:
            InputError: there is one, and neither was asked for.
        """
        if not self.path.exists() or resume:
            return
        if not force:
            raise InputError(
                "an interrupted collection left a checkpoint",
                where=self.path,
                fix="continue it with --resume, or discard it with --force",
            )
        if not dry_run:
            remove_checkpoint(self.path)

    def open(self, planned: StatsHeader, device: str) -> StatsPart | None:
        """Begin a collection; return what an interrupted one had finished, or None.

        Raises:
            InputError: the checkpoint is of another collection; names the fields that differ.
            CorruptArtifactError: the checkpoint is damaged.
        """
        self._header = CheckpointHeader(planned=planned, device=device, sequences=(), probe=())
        if not self.path.exists():
            return None
        file = read_checkpoint(self.path)
        if found := differences(_fixed(file.header), _fixed(self._header)):
            raise InputError(
                f"the checkpoint is of another collection: {listed(found)}",
                where=self.path,
                fix="repeat the interrupted command with --resume, or discard the checkpoint with --force",
            )
        self._saved = frozenset(file.header.sequences + file.header.probe)
        return StatsPart(file.header.sequences, file.header.probe, file.moments, file.samples)

    @property
    def due(self) -> bool:
        """True when it is time to write the next one."""
        if not self._every:
            return self._every == 0
        return time.monotonic() - self._last >= max(self._every, COST * self._cost)

    @contextmanager
    def kept(self, capture: Capture) -> Iterator[None]:
        """Keep what is finished when a signal ends the block, and leave a note that says how to continue.

        Raises:
            Interrupted, KeyboardInterrupt: as they came; the note is theirs.
        """
        try:
            yield
        except (KeyboardInterrupt, Interrupted) as stop:
            if self._every is not None and capture.whole and capture.done - self._saved:
                self.save(capture)
            if self.path.exists():
                stop.add_note(CONTINUE)
            raise

    def save(self, capture: Capture) -> None:
        """Write the state; a failure is told and the collection goes on with the checkpoint that it had."""
        if self._header is None:
            raise RuntimeError("the checkpoint was not opened")
        started = time.monotonic()
        part = capture.result
        header = self._header.model_copy(update={"sequences": part.sequences, "probe": part.probe})
        try:
            write_checkpoint(self.path, header, part.moments, part.samples)
            self._saved = capture.done
        except KvcqError as error:
            self._reporter.warn(f"no checkpoint: {error}")
        self._last = time.monotonic()
        self._cost = self._last - started

    def discard(self) -> None:
        """Remove the checkpoint: the collection is complete."""
        remove_checkpoint(self.path)


def _fixed(header: CheckpointHeader) -> dict[str, Any]:
    planned = {key: value for key, value in header.planned.plain().items() if key not in OPEN_FIELDS}
    return {"device": header.device, **planned}
