"""collect: stream text through a model and write the statistics of its attention."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvcq.artifacts.claim import claim
from kvcq.artifacts.stats_file import write_stats
from kvcq.capture.budget import Estimate, check_tokens, estimate
from kvcq.capture.collect import Capture
from kvcq.capture.selfcheck import self_check
from kvcq.data.documents import check_sources
from kvcq.data.sequences import Corpus, TokenSequence
from kvcq.errors import ResourceError
from kvcq.models.load import LoadedModel
from kvcq.pipeline.checkpoint import Checkpoint
from kvcq.pipeline.eligible import bf16_reason
from kvcq.pipeline.output import exclusive
from kvcq.pipeline.progress import SILENT, Reporter
from kvcq.pipeline.regimes import one_regime
from kvcq.pipeline.requests import CollectRequest
from kvcq.pipeline.result import aligned
from kvcq.pipeline.shards import check_shard, sharded
from kvcq.pipeline.sources import open_corpus, open_model
from kvcq.pipeline.versions import versions
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.header import Shard, StatsHeader
from kvcq.stats.part import StatsPart
from kvcq.stats.probe import ProbePlan, choose_probe
from kvcq.stats.sampling import RowSelection

CHECK_TOKENS = 48
MIB = 2**20


@dataclass(frozen=True)
class CollectResult:
    """What collect wrote; `path` is None after a dry run."""

    path: Path | None
    header: StatsHeader
    planned: Estimate

    def text(self) -> str:
        """Return the result for people."""
        header = self.header
        layers = header.geometry.quantizable()
        rows = [
            ("statistics", str(self.path) if self.path else "dry run, nothing written"),
            ("model", f"{header.provenance.source} ({header.geometry.model_type})"),
            ("layers", f"{len(layers)} of {len(header.geometry.layers)} measured"),
            ("text", ", ".join(header.data.sources)),
            ("tokens", f"{header.tokens} in {len(header.sequences)} sequences, probe of {len(header.probe)}"),
            *([("shard", f"{header.shard}, to be merged with the others")] if header.shard else []),
            ("rows", f"up to {header.rows} keys and values, {header.query_rows} queries per layer"),
        ]
        if self.path:
            rows.append(("digest", header.digest))
        return "\n".join(aligned(rows))

    def payload(self) -> dict[str, Any]:
        """Return the result for machines."""
        return {
            "path": str(self.path) if self.path else None,
            "digest": self.header.digest or None,
            "tokens": self.header.tokens,
            "shard": str(self.header.shard) if self.header.shard else None,
            "layers": [layer.layer for layer in self.header.geometry.quantizable()],
            "warnings": list(self.header.warnings),
            "planned_memory_bytes": self.planned.memory_bytes,
            "planned_disk_bytes": self.planned.disk_bytes,
        }


@exclusive
def collect(request: CollectRequest, reporter: Reporter = SILENT) -> CollectResult:
    """Collect attention statistics and write a stats folder.

    The self-check runs before every collection: own logits equal the untouched model's, every planned layer is
    called, captured K and V equal the cache, and shifted positions prove the rotary embedding.

    Raises:
        InputError: bad text or flags, too few tokens, or a checkpoint that is not asked for or does not match.
        CorruptArtifactError: a damaged checkpoint.
        UnsupportedError: the model's attention cannot be captured faithfully.
        ResourceError: the disk cannot hold the result.
    """
    check_shard(request.shard)
    check_sources(request.data)
    checkpoint = Checkpoint(request.out, request.checkpoint_every, reporter)
    checkpoint.settle(resume=request.resume, force=request.force, dry_run=request.dry_run)
    loaded = open_model(request, reporter, longest=request.seq_len)
    corpus = open_corpus(request, loaded, reporter, seq_len=request.seq_len, num_tokens=request.num_tokens)
    warnings = list(corpus.warnings)

    def warn(line: str) -> None:
        warnings.append(line)
        reporter.warn(line)

    for line in one_regime(loaded.geometry, corpus, request.seq_len, request.chunk):
        warn(line)
    reporter.stage("self-check of the capture")
    geometry = self_check(
        loaded, torch.from_numpy(corpus.sequences[0].tokens[:CHECK_TOKENS].astype("int64")), warn=warn
    )
    plan = choose_probe([(sequence.digest, sequence.segments) for sequence in corpus.sequences])
    for line in check_tokens(geometry, sum(plan.counted.values())):
        warn(line)
    longest = max(len(sequence.tokens) for sequence in corpus.sequences)
    planned = estimate(loaded, geometry, plan, request.rows, request.query_rows, longest)
    reporter.note(
        f"planned: {planned.memory_bytes / MIB:.0f} MiB of memory beside the model, "
        f"{planned.disk_bytes / MIB:.0f} MiB on disk"
    )
    check_disk(request.out, planned)
    selection = RowSelection(request.rows, request.query_rows, request.seed)
    for digest, counted in plan.counted.items():
        if counted:
            selection.offer(digest, counted)
    sequences = sharded(corpus.sequences, request.shard)
    header = describe(request, loaded, geometry, corpus, plan, tuple(warnings))
    if request.dry_run:
        return CollectResult(None, header, planned)
    capture = Capture(loaded, geometry, selection, plan)
    with claim(checkpoint.path):
        earlier = checkpoint.open(header, hardware(loaded))
        if earlier is not None:
            capture.restore(earlier)
        elif request.resume:
            reporter.note("no checkpoint to resume from: collecting from the beginning")
        with checkpoint.kept(capture):
            part = run(capture, sequences, request.chunk, checkpoint, reporter)
            reporter.stage("writing statistics")
            header = header.model_copy(update={"sequences": part.sequences, "probe": part.probe, "tokens": part.tokens})
            header = write_stats(request.out, header, part.moments, part.samples, force=request.force)
        checkpoint.discard()
    return CollectResult(request.out, header, planned)


def run(
    capture: Capture, sequences: Sequence[TokenSequence], chunk: int, checkpoint: Checkpoint, reporter: Reporter
) -> StatsPart:
    """Forward every sequence that is not done yet through the capture and return the packed statistics."""
    reporter.stage("collecting")
    total = sum(len(sequence.tokens) for sequence in sequences)
    waiting = [sequence for sequence in sequences if sequence.digest not in capture.done]
    done = total - sum(len(sequence.tokens) for sequence in waiting)
    if done:
        reporter.note(f"resuming after {done} of {total} tokens")
    for sequence in waiting:
        capture.run(sequence, chunk)
        done += len(sequence.tokens)
        reporter.advance(done, total, "tokens")
        if checkpoint.due and done < total:
            checkpoint.save(capture)
    return capture.result


def hardware(loaded: LoadedModel) -> str:
    """Return what computes the model: the same sums come out of the same hardware only."""
    device = loaded.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def describe(
    request: CollectRequest,
    loaded: LoadedModel,
    geometry: ModelGeometry,
    corpus: Corpus,
    plan: ProbePlan,
    warnings: tuple[str, ...],
) -> StatsHeader:
    """Compose the header: everything that is known before the first forward."""
    counted = {digest: tokens for digest, tokens in plan.counted.items() if tokens}
    return StatsHeader(
        identity=loaded.identity,
        provenance=loaded.provenance,
        geometry=geometry,
        data=corpus.source,
        sequences=tuple(sorted(counted)),
        probe=plan.digests,
        probe_split=plan.split,
        shard=None
        if request.shard is None
        else Shard(index=request.shard[0], count=request.shard[1], sequences=len(corpus.sequences)),
        tokens=sum(counted.values()),
        longest=longest_position(corpus, plan),
        rows=request.rows,
        query_rows=min(request.rows, request.query_rows),
        seed=request.seed,
        dtype=loaded.dtype_name,
        chunk=request.chunk,
        skipped={
            str(layer.layer): reason
            for layer in geometry.layers
            if layer.kind != "full" and (reason := bf16_reason(layer)) is not None
        },
        warnings=warnings,
        versions=versions(),
    )


def longest_position(corpus: Corpus, plan: ProbePlan) -> int:
    """Return the number of positions that counted tokens stand at: isolated texts all start at 0."""
    return max(
        min(stop, plan.counted[sequence.digest]) - start
        for sequence in corpus.sequences
        for start, stop in sequence.segments
    )


def check_disk(out: Path, planned: Estimate) -> None:
    """Refuse to start when the result would not fit on the disk.

    Raises:
        ResourceError: less free space than planned; names ``--rows``.
    """
    folder = out.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < planned.disk_bytes:
        raise ResourceError(
            f"the statistics need {planned.disk_bytes / MIB:.0f} MiB and {free / MIB:.0f} MiB are free",
            where=out,
            fix="free space, or lower --rows",
        )
