"""What ``kvcq bench serve`` is asked to do. Light to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcq.pipeline.requests import BOUND_GBS, Request


@dataclass(frozen=True, kw_only=True)
class ServeBenchRequest(Request):
    """Time SGLang with BF16 and with bundles, one server after the other, on this machine.

    Attributes:
        model: Hub id or local folder; None with `synthetic`.
        bundles: Bundles of the model.
        bf16: Attention backends of SGLang to serve BF16 with; the fastest is what others are compared with.
        synthetic: Shape whose random weights and bundles are made instead.
        layers: Layers of that shape, fewer or more than it has.
        kinds: Synthetic bundles: ``int2``, ``vq``.
        cells: Decode speed, ``BATCHxINPUT`` or ``fullxINPUT``.
        prompts: Prefill speed.
        hits: Speed at prefix hits of 0, 50 and about 100 %.
        jobs: Wall time of so many requests, however many run at once.
        splits: What a decode step consists of.
        filled: Contexts of cells, jobs and splits are random rows that are put there instead of being prefilled.
        output: Tokens that each request generates.
        job_output: Likewise in jobs.
        seed: Of the prompts.
        max_running: Requests that a server runs at once.
        max_context: Most tokens of a request; None: the model's context.
        dtype: ``auto`` or ``bfloat16``.
        arguments: Flags for SGLang, for every arm.
        bandwidth: Of the memory of one GPU, GB/s, for the rooflines.
        start_seconds: Longest time until a server answers, in seconds.
        out: JSON file, written anew after every cell.
        charts: Folder for SVG files.
        force: Replace an existing record, and existing drawings.
        dry_run: Say what would be measured, and start nothing.
    """

    model: str | None = None
    bundles: tuple[Path, ...] = ()
    bf16: tuple[str, ...] = ("triton", "flashinfer")
    synthetic: str | None = None
    layers: int | None = None
    kinds: tuple[str, ...] = ("int2", "vq")
    cells: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    hits: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()
    filled: bool = False
    output: int = 256
    job_output: int = 1024
    seed: int = 0
    max_running: int = 128
    max_context: int | None = None
    dtype: str = "auto"
    arguments: tuple[str, ...] = ()
    bandwidth: float = BOUND_GBS
    start_seconds: float = 1200.0
    out: Path | None = None
    charts: Path | None = None
    force: bool = False
    dry_run: bool = False
