"""serve: a bundle and a model behind OpenAI's HTTP interface, after proof that the bundle is on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from kvcq.artifacts.bundle import Bundle
from kvcq.artifacts.verify import read_any
from kvcq.data.documents import Document
from kvcq.data.template import chat_prompt, iter_tokens
from kvcq.errors import InputError, Interrupted, UnavailableError, UnsupportedError
from kvcq.models.load import LoadedModel
from kvcq.pipeline.capacity import Capacity, plan_capacity, startup_lines
from kvcq.pipeline.progress import SILENT, Reporter
from kvcq.pipeline.proof import Proof, prove
from kvcq.pipeline.ready import Ready
from kvcq.pipeline.requests import ServeRequest
from kvcq.pipeline.sources import open_model, read_text
from kvcq.reports.text import plural
from kvcq.runtime.codecs import served_codecs
from kvcq.runtime.compat import Sealed, check_frame, check_model
from kvcq.runtime.hf.cache import Host
from kvcq.runtime.hf.kernels import describe

EXTRA = ("fastapi", "uvicorn", "prometheus_client")
JOIN_SECONDS = 30.0


@dataclass(frozen=True)
class ServeResult:
    """What a server has done until it was stopped.

    Attributes:
        done: Finished answers by reason.
        failed: Requests without a complete answer, by kind.
    """

    done: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)


def serve(
    request: ServeRequest, reporter: Reporter = SILENT, on_ready: Callable[[Ready], None] | None = None
) -> ServeResult:
    """Serve until a signal, or until ``Ready.stop`` is called.

    Args:
        request: What and where.
        reporter: Receives progress and the startup table.
        on_ready: Called once requests are accepted; not before the bundle has been proven to be on.

    Raises:
        InputError: not a bundle, a port in use, limits that do not fit together.
        CorruptArtifactError: a damaged bundle.
        MismatchError: another model, or activation is not proven.
        UnavailableError: the extra is not installed.
    """
    if missing := [name for name in EXTRA if find_spec(name) is None]:
        raise UnavailableError(f"serving needs {missing[0]}", where="serve", fix="pip install 'kvcq[serve]'")
    from kvcq.runtime.hf.api.server import bind, url_of

    if request.threads is not None:
        torch.set_num_threads(request.threads)
    reporter.stage("verifying the bundle")
    bundle = _open_bundle(request)
    capacity = plan_capacity(request, bundle.manifest)
    template = read_text(request.chat_template, "--chat-template")
    with closing(bind(request.host, request.port)) as bound:
        url = url_of(bound, request.host)
        loaded = open_model(request, reporter, longest=capacity.context)
        _check(request, bundle, loaded, capacity, reporter)
        manifest = bundle.manifest
        codecs = served_codecs(manifest.plan, manifest.geometry, bundle.tensors, loaded.device)
        with Host(loaded.model, codecs, manifest.geometry, manifest.recipe.windows) as host:
            reporter.stage("proving that the bundle is on")
            proof = prove(bundle, host)
            for line in startup_lines(request, bundle, loaded, capacity, proof, describe(host.kernels)):
                reporter.note(line)
            return _run(request, bundle, loaded, host, capacity, proof, template, url, bound, on_ready, reporter)


def _open_bundle(request: ServeRequest) -> Bundle:
    found = read_any(request.bundle)
    if not isinstance(found, Bundle):
        raise InputError("not a bundle", where=request.bundle, fix="name a .kvcq that kvcq pack has written")
    if not any(entry.quantized for entry in found.manifest.plan):
        raise UnsupportedError("the bundle quantizes no layer: there is nothing to serve", where=request.bundle)
    return found


def _check(request: ServeRequest, bundle: Bundle, loaded: LoadedModel, capacity: Capacity, reporter: Reporter) -> None:
    """Refuse another model, and warn of what is known to cost accuracy."""
    manifest = bundle.manifest
    sealed = Sealed(request.bundle.name, manifest.identity, manifest.provenance, manifest.geometry)
    for line in check_model(sealed, loaded, strict=request.strict):
        reporter.warn(line)
    check_frame(sealed, loaded.geometry)
    if by_length := [regime for regime in loaded.geometry.length_regimes() if not regime.endswith(":short")]:
        raise UnsupportedError(
            f"RoPE {by_length[0]} changes with the length of a sequence, while its keys are in the cache",
            where="--max-context",
            fix="stay within the context that the model was first trained with",
        )
    if manifest.target_context < capacity.context:
        reporter.warn(
            f"fitted for contexts up to {manifest.target_context} tokens, serving up to {capacity.context}: accuracy "
            "beyond is not what was measured"
        )
    if request.host not in ("127.0.0.1", "localhost", "::1"):
        reporter.warn(f"{request.host}: whoever reaches this address can use the server, there is no authentication")


def _run(
    request: ServeRequest,
    bundle: Bundle,
    loaded: LoadedModel,
    host: Host,
    capacity: Capacity,
    proof: Proof,
    template: str | None,
    url: str,
    bound: Any,
    on_ready: Callable[[Ready], None] | None,
    reporter: Reporter,
) -> ServeResult:
    from kvcq.runtime.hf.api.about import About
    from kvcq.runtime.hf.api.metrics import Meters
    from kvcq.runtime.hf.api.server import Server
    from kvcq.runtime.hf.api.service import Service, Words
    from kvcq.runtime.hf.engine.engine import Engine, Limits

    manifest, tokenizer = bundle.manifest, loaded.tokenizer
    words = Words(
        encode=lambda text: _prompt(tokenizer, text, capacity.context),
        render=lambda turns, thinking: chat_prompt(tokenizer, turns, chat_template=template, thinking=thinking),
        decode=lambda ids: _text(tokenizer, ids, skip=True),
        show=lambda ids: _text(tokenizer, ids, skip=False),
    )
    record = {
        "bundle": request.bundle.name,
        "method": manifest.recipe.method,
        "windows": manifest.recipe.windows.plain(),
        "canary": proof.statistic,
        "semantics": "by-query",
        "kernels": describe(host.kernels),
        "capacity_tokens": capacity.tokens,
    }
    about = About(
        name=request.served_name or loaded.source.label,
        digest=manifest.digest,
        context=capacity.context,
        vocabulary=loaded.geometry.vocab_size,
        stop_ids=_stop_ids(loaded),
        bytes_per_token=capacity.bytes_per_token,
        capacity=capacity.tokens,
        statistic=proof.statistic,
        record=record,
    )
    limits = Limits(
        pages=capacity.pages,
        running=request.max_running,
        queue=request.max_queue,
        chunk=request.chunk,
        timeout=request.timeout,
    )
    engine = Engine(loaded.model, host.new_cache, words.decode, limits)
    service = Service(engine, words, about, Meters(engine, about))

    def ready() -> None:
        if on_ready is not None:
            told = {"url": url, "model": about.name, "digest": about.digest, "context": about.context, **record}
            on_ready(Ready(url, told, server.stop))

    def closing() -> None:
        if request.grace and (left := engine.running + engine.waiting):
            reporter.note(
                f"waiting up to {request.grace:g} s for {plural(left, 'request')}; a second signal ends at once"
            )

    server = Server(service, request.grace, ready, closing)
    engine.start()
    counts = engine.counts
    try:
        server.run(sockets=[bound])
    except Interrupted as error:
        error.add_note(f"the server has shut down, {counts.done.total()} answers given")
        raise
    finally:
        engine.close(0)
        engine.join(JOIN_SECONDS)
    if engine.failure is not None:
        raise engine.failure
    return ServeResult(dict(counts.done), dict(counts.failed))


def _stop_ids(loaded: LoadedModel) -> frozenset[int]:
    """Return the tokens that end an answer: the generation config's, which chat models extend, and the tokenizer's."""
    config = getattr(loaded.model, "generation_config", None)
    given = getattr(config, "eos_token_id", None)
    found = list(given) if isinstance(given, list | tuple) else [given]
    return frozenset(token for token in [*found, getattr(loaded.tokenizer, "eos_token_id", None)] if token is not None)


def _prompt(tokenizer: Any, text: str, most: int) -> list[int]:
    """Return the ids of a prompt, or of so much of it that it is too long."""
    ids: list[int] = []
    for piece in iter_tokens(tokenizer, Document(text=text), "raw"):
        ids += piece
        if len(ids) > most:
            break
    return ids


def _text(tokenizer: Any, ids: Any, *, skip: bool) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
