"""The endpoints."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from kvcq.runtime.hf.api import errors
from kvcq.runtime.hf.api.body import BodyLimit
from kvcq.runtime.hf.api.forms import ChatForm, CompletionForm
from kvcq.runtime.hf.api.metrics import CONTENT_TYPE
from kvcq.runtime.hf.api.responder import Outcome
from kvcq.runtime.hf.api.schemas import Body, ChatBody, CompletionBody
from kvcq.runtime.hf.api.service import Service
from kvcq.runtime.hf.engine.request import Ask
from kvcq.version import __version__

# Lengths of answers when a request does not say: OpenAI's for completions, a bound on what is reserved for chats.
COMPLETION_TOKENS = 16
CHAT_TOKENS = 1024


def create_app(service: Service) -> FastAPI:
    """Return the ASGI app of a service."""
    # No pages of documentation: they would load scripts from elsewhere.
    app = FastAPI(title="kvcq", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(BodyLimit)
    errors.install(app)
    _install_answers(app, service)
    _install_state(app, service)
    return app


def _install_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionBody) -> Response:
        service.check_model(body.model)
        body.refuse()
        prompts, most = await run_in_threadpool(_read_prompts, service, body)
        copies = body.n or 1
        scored = body.logprobs is not None
        asks = [
            _ask(service, body, ids, most, choice, body.logprobs, prompt_scores=bool(body.echo) and scored)
            for ids, _ in prompts
            for choice in range(copies)
        ]
        echoes = [text for _, text in prompts for _ in range(copies)] if body.echo else None
        form = CompletionForm(service, scored=scored, echoes=echoes)
        return _outcome(service, body, asks, form, sum(len(ids) for ids, _ in prompts))

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody) -> Response:
        service.check_model(body.model)
        body.refuse()
        scores = body.scores()
        options = body.chat_template_kwargs
        thinking = bool(options and options.enable_thinking)
        turns = [message.plain() for message in body.messages]
        ids = await run_in_threadpool(service.words.render, turns, thinking)
        given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        most = max(min(CHAT_TOKENS, service.about.context - len(ids)), 1) if given is None else given
        service.check_length(ids, most, "messages")
        asks = [_ask(service, body, ids, most, choice, scores) for choice in range(body.n or 1)]
        return _outcome(service, body, asks, ChatForm(service, scored=scores is not None), len(ids))


def _install_state(app: FastAPI, service: Service) -> None:
    engine, about = service.engine, service.about

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service)

    @app.get("/health")
    async def health() -> JSONResponse:
        record = {"status": "ok" if engine.alive else "failed", "digest": about.digest}
        return JSONResponse(record, 200 if engine.alive else 503)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        open_ = engine.alive and not engine.closing
        return JSONResponse({"status": "ready" if open_ else "closing"}, 200 if open_ else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.meters.text(), media_type=CONTENT_TYPE)


def _model(service: Service) -> dict[str, Any]:
    about = service.about
    return {
        "id": about.name,
        "object": "model",
        "created": service.started,
        "owned_by": "kvcq",
        "max_model_len": about.context,
        "kvcq": {"digest": about.digest, "bytes_per_token": about.bytes_per_token, **about.record},
    }


def _read_prompts(service: Service, body: CompletionBody) -> tuple[list[tuple[list[int], str]], int]:
    """Return the prompts as (ids, text), and the most tokens of an answer."""
    most = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    read = []
    for prompt in body.prompts():
        ids = service.words.encode(prompt) if isinstance(prompt, str) else prompt
        service.check_length(ids, most, "prompt")
        read.append((ids, prompt if isinstance(prompt, str) else service.words.show(ids)))
    return read, most


def _ask(
    service: Service,
    body: Body,
    ids: list[int],
    most: int,
    choice: int,
    scores: int | None,
    *,
    prompt_scores: bool = False,
) -> Ask:
    own = frozenset() if body.ignore_eos else service.about.stop_ids
    return Ask(
        prompt=tuple(ids),
        max_tokens=most,
        sampling=body.sampling(choice, scores),
        stop=body.stops(),
        stop_ids=own | frozenset(body.stop_token_ids or ()),
        prompt_scores=prompt_scores,
    )


def _outcome(
    service: Service, body: Body, asks: list[Ask], form: CompletionForm | ChatForm, prompt_tokens: int
) -> Outcome:
    return Outcome(
        service.submit(asks),
        form,
        choices=len(asks),
        prompt_tokens=prompt_tokens,
        stream=bool(body.stream),
        usage=body.wants_usage,
    )
