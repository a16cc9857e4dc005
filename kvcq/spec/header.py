"""Headers of the intermediate artifacts: ``stats.json`` and ``fit.json``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from kvcq.spec.base import NumberKey, SpecModel
from kvcq.spec.files import FileEntry, Sha256, TensorEntry
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.identity import Identity, Provenance
from kvcq.spec.plan import LayerPlan
from kvcq.spec.recipe import Recipe

NoteKey = Annotated[str, StringConstraints(pattern=r"^layers\.(0|[1-9][0-9]{0,14})\.[a-z][a-z_0-9]{0,63}$")]


class DataSource(SpecModel):
    """Where text came from: labels of the sources, never their content, and a digest of the token ids."""

    sources: tuple[str, ...]
    sha256: str
    template: str
    packing: str
    seq_len: int
    wanted_tokens: int | None = None
    got_tokens: int


class Shard(SpecModel):
    """Which part of a collection: the sequences whose place in the whole list is `index` modulo `count`.

    `sequences` is the length of the whole list, by which merge knows that nothing is missing.
    """

    index: int = Field(ge=0)
    count: int = Field(ge=1)
    sequences: int = Field(ge=0)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


class StatsHeader(SpecModel):
    """``stats.json``: what was measured, on what, and how.

    `sequences` and `probe` hold digests of token ids (unsalted: stats are as private as the text).
    `tokens` counts the tokens behind the moments (the probe is excluded); `longest` is the longest sequence.
    `rows` and `query_rows` are the budgets asked for; fewer are stored when there are fewer tokens.
    `shard` is set while other shards of the collection are still to be merged: `sequences`, `probe` and `tokens` are
    then those of the shard, everything else is that of the whole collection.
    `files` and `digest` (SHA-256 of the canonical header without that field) are filled in by the writer.
    """

    format: Literal["kvcq.stats"] = "kvcq.stats"
    version: Literal[1] = 1
    identity: Identity
    provenance: Provenance
    geometry: ModelGeometry
    data: DataSource
    sequences: tuple[str, ...]
    probe: tuple[str, ...]
    probe_split: bool = False
    shard: Shard | None = None
    tokens: int = Field(ge=0)
    longest: int = Field(ge=0)
    rows: int = Field(ge=0)
    query_rows: int = Field(ge=0)
    seed: int
    dtype: str
    chunk: int
    skipped: dict[NumberKey, str]
    warnings: tuple[str, ...] = ()
    versions: dict[str, str]
    files: tuple[FileEntry, ...] = ()
    digest: Sha256 = ""


class FitHeader(SpecModel):
    """``fit.json``: the recipe as run, the plan, and the served tensors.

    Attributes:
        stats_digest: `StatsHeader.digest` of the statistics.
        collected_context: Longest position behind the statistics.
        target_context: Context length the statistics were averaged for; equal to `collected_context` without one.
        tensors_digest: SHA-256 of the canonical tensor index and all tensor data, in index order.
        notes: Measured facts of the fit worth reporting, e.g. |mean k|^2 / variance by layer.
        files, digest: Filled in by the writer; digest is the SHA-256 of the canonical header without that field.
    """

    format: Literal["kvcq.fit"] = "kvcq.fit"
    version: Literal[1] = 1
    recipe: Recipe
    stats_digest: str
    identity: Identity
    provenance: Provenance
    geometry: ModelGeometry
    calibration: DataSource
    collected_context: int
    target_context: int
    plan: tuple[LayerPlan, ...]
    tensors: tuple[TensorEntry, ...]
    tensors_digest: str
    notes: dict[NoteKey, tuple[float, ...]] = Field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    versions: dict[str, str]
    files: tuple[FileEntry, ...] = ()
    digest: Sha256 = ""
