"""merge: the shards of one collection to the statistics that a single run would have written, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcq.artifacts.stats_file import read_stats, read_stats_header, write_stats
from kvcq.errors import InputError, MismatchError
from kvcq.pipeline.output import exclusive
from kvcq.pipeline.progress import SILENT, Reporter
from kvcq.pipeline.requests import MergeRequest
from kvcq.pipeline.result import aligned
from kvcq.spec.compare import differences, listed
from kvcq.spec.header import Shard, StatsHeader
from kvcq.stats.part import StatsPart, merge_parts

# What belongs to a shard alone, and what follows from the rest.
OWN_FIELDS = frozenset({"shard", "sequences", "probe", "tokens", "warnings", "files", "digest"})
MODEL_FIELDS = ("identity", "provenance", "geometry")


@dataclass(frozen=True)
class Piece:
    """One input: where it is, what it says, and which shard it is."""

    path: Path
    header: StatsHeader
    shard: Shard


@dataclass(frozen=True)
class MergeResult:
    """What merge wrote; `path` is None after a dry run."""

    path: Path | None
    header: StatsHeader
    shards: int

    def text(self) -> str:
        """Return the result for people."""
        header = self.header
        rows = [
            ("statistics", str(self.path) if self.path else "dry run, nothing written"),
            ("model", f"{header.provenance.source} ({header.geometry.model_type})"),
            ("shards", str(self.shards)),
            ("tokens", f"{header.tokens} in {len(header.sequences)} sequences, probe of {len(header.probe)}"),
        ]
        if self.path:
            rows.append(("digest", header.digest))
        return "\n".join(aligned(rows))

    def payload(self) -> dict[str, Any]:
        """Return the result for machines."""
        return {
            "path": str(self.path) if self.path else None,
            "digest": self.header.digest or None,
            "shards": self.shards,
            "tokens": self.header.tokens,
            "warnings": list(self.header.warnings),
        }


@exclusive
def merge(request: MergeRequest, reporter: Reporter = SILENT) -> MergeResult:
    """Join all shards of one collection; the result does not depend on their number or order.

    Headers are compared before any array is read. Then one shard after the other is read and checked: memory holds
    the sums of one shard beside the result.

    Raises:
        InputError: an input is no shard, shards overlap or are missing, or come from other text or options.
        MismatchError: shards of different models.
        CorruptArtifactError: a damaged shard.
    """
    reporter.stage("comparing shards")
    pieces = open_pieces(request.stats)
    check_same(pieces)
    check_complete(pieces)
    header = whole_header(pieces)
    if request.dry_run:
        return MergeResult(None, header, len(pieces))
    reporter.stage("merging")
    part = merge_parts(header.geometry, read_parts(pieces, reporter), header.rows, header.query_rows)
    reporter.stage("writing statistics")
    header = write_stats(request.out, header, part.moments, part.samples, force=request.force)
    return MergeResult(request.out, header, len(pieces))


def open_pieces(paths: Sequence[Path]) -> list[Piece]:
    """Read the headers of all inputs, in the order of their shards.

    Raises:
        InputError: no input, or one that is no shard.
    """
    if not paths:
        raise InputError("nothing to merge", where="STATS", fix="name all shards of one collection")
    pieces = []
    for path in paths:
        header = read_stats_header(path)
        if header.shard is None:
            raise InputError("not a shard but a whole collection", where=path, fix="fit it as it is")
        pieces.append(Piece(path, header, header.shard))
    return sorted(pieces, key=lambda piece: (piece.shard.index, piece.shard.count, str(piece.path)))


def check_same(pieces: Sequence[Piece]) -> None:
    """Refuse shards of different collections.

    Raises:
        MismatchError: they measured different models.
        InputError: other text or options; names the fields.
    """
    first = pieces[0]
    for piece in pieces[1:]:
        if found := differences(_common(first), _common(piece)):
            error = MismatchError if any(line.startswith(MODEL_FIELDS) for line in found) else InputError
            raise error(
                f"shards of different collections: {listed(found)}",
                where=f"{first.path}, {piece.path}",
                fix="collect all shards with the same model, text and options",
            )


def check_complete(pieces: Sequence[Piece]) -> None:
    """Refuse shards that share a sequence, and a set that is not the whole collection.

    Raises:
        InputError: names the shards that overlap, or those that are missing.
    """
    owner: dict[str, Piece] = {}
    for piece in pieces:
        mine = {*piece.header.sequences, *piece.header.probe}
        for digest in sorted(mine & owner.keys()):
            raise InputError(
                f"shards {owner[digest].shard} and {piece.shard} share sequence {digest[:12]}",
                where=f"{owner[digest].path}, {piece.path}",
                fix="give each shard once",
            )
        owner |= dict.fromkeys(mine, piece)
    whole = pieces[0].shard
    if len(owner) != whole.sequences:
        counts = {piece.shard.count for piece in pieces}
        missing = sorted(set(range(whole.count)) - {piece.shard.index for piece in pieces})
        named = f", shards {', '.join(f'{i}/{whole.count}' for i in missing)} are missing" if len(counts) == 1 else ""
        raise InputError(
            f"{len(owner)} of {whole.sequences} sequences{named}", where="STATS", fix="merge all shards at once"
        )


def whole_header(pieces: Sequence[Piece]) -> StatsHeader:
    """Return the header of the whole collection, as one run writes it."""
    headers = [piece.header for piece in pieces]
    return headers[0].model_copy(
        update={
            "shard": None,
            "sequences": tuple(sorted(digest for one in headers for digest in one.sequences)),
            "probe": tuple(sorted(digest for one in headers for digest in one.probe)),
            "tokens": sum(one.tokens for one in headers),
            # Every shard knows the whole text and warns of the same.
            "warnings": tuple(dict.fromkeys(line for one in headers for line in one.warnings)),
            "files": (),
            "digest": "",
        }
    )


def read_parts(pieces: Sequence[Piece], reporter: Reporter) -> Iterator[StatsPart]:
    """Read and check one shard after the other.

    Raises:
        CorruptArtifactError: a damaged shard.
        InputError: another header than before.
    """
    for done, piece in enumerate(pieces, start=1):
        stats = read_stats(piece.path)
        if stats.header != piece.header:
            raise InputError("the shard changed while it was merged", where=piece.path, fix="run the command again")
        yield StatsPart(piece.header.sequences, piece.header.probe, stats.moments, stats.samples)
        reporter.advance(done, len(pieces), "shards")


def _common(piece: Piece) -> dict[str, Any]:
    fields = {key: value for key, value in piece.header.plain().items() if key not in OWN_FIELDS}
    return {**fields, "shard.sequences": piece.shard.sequences}
