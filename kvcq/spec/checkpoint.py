"""``checkpoint.json``: an interrupted collection, and what may continue it."""

from __future__ import annotations

from typing import Literal

from kvcq.spec.base import SpecModel
from kvcq.spec.files import FileEntry, Sha256
from kvcq.spec.header import StatsHeader


class CheckpointHeader(SpecModel):
    """State of a collection after some of its sequences.

    Attributes:
        planned: The header that the finished collection will have, sealed without files: who continues must plan the
            same.
        device: What computed the sums: other hardware rounds differently.
        sequences: Sorted digests of the finished sequences behind moments and rows.
        probe: Sorted digests of the finished sequences of the probe.
        files, digest: Filled in by the writer; digest is the SHA-256 of the canonical header without that field.
    """

    format: Literal["kvcq.checkpoint"] = "kvcq.checkpoint"
    version: Literal[1] = 1
    planned: StatsHeader
    device: str
    sequences: tuple[str, ...]
    probe: tuple[str, ...]
    files: tuple[FileEntry, ...] = ()
    digest: Sha256 = ""
