"""The arms of a run, each a server: BF16 by plain SGLang, bundles by the way of ``kvcq serve --engine sglang``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcq.artifacts.bundle import Bundle
from kvcq.errors import MismatchError, shown
from kvcq.pipeline.bench_serve.model import Subject
from kvcq.pipeline.bench_serve.request import ServeBenchRequest
from kvcq.pipeline.progress import Reporter
from kvcq.pipeline.ready import Ready
from kvcq.pipeline.serve_sglang import free_port, serve_sglang
from kvcq.pipeline.sglang.arguments import OVERRIDES, Given, flag, read_given
from kvcq.pipeline.sglang.child import Child
from kvcq.pipeline.sglang.client import Client
from kvcq.pipeline.sglang.machine import Machine
from kvcq.pipeline.sglang.memory import FRACTION, USUAL_FRACTION
from kvcq.pipeline.sglang.proof import check_after
from kvcq.pipeline.sglang.request import SglangRequest
from kvcq.pipeline.sglang.running import Start, watch
from kvcq.runtime.layout import kv_bytes_per_token
from kvcq.runtime.sglang.filled import FLAG, KEY

HOST = "127.0.0.1"
GRAPHS = "cuda_graph_max_bs"
# What says which graphs of decode steps there are.
SIZES = (GRAPHS, "cuda_graph_bs", "cuda_graph_config", "disable_cuda_graph")


@dataclass(frozen=True)
class Arm:
    """What one server does.

    Attributes:
        name: ``bf16-triton`` or the name of a bundle.
        backend: SGLang's attention backend.
        bundle: None for BF16.
    """

    name: str
    backend: str
    bundle: str | None = None


@dataclass(frozen=True)
class Running:
    """A server that is up and is what it should be.

    Attributes:
        arm: Which one.
        url: Where.
        key: Bearer token; None: it wants none.
        capacity: Tokens of its pool.
        most: Requests that it runs at once.
        cell: Bytes of a token in its pages, all ranks; None where not known.
        record: What it said of itself.
    """

    arm: Arm
    url: str
    key: str | None
    capacity: int
    most: int
    cell: int | None
    record: Mapping[str, Any]


Measure = Callable[[Running], None]


def arms_of(request: ServeBenchRequest, subject: Subject) -> list[Arm]:
    """Return the arms in the order in which they are run, BF16 first."""
    plain = [Arm(f"bf16-{backend}", backend) for backend in request.bf16]
    return plain + [Arm(name, "kvcq", name) for name in subject.bundles]


def run_arm(
    arm: Arm, request: ServeBenchRequest, subject: Subject, machine: Machine, measure: Measure, reporter: Reporter
) -> None:
    """Start the server of an arm, measure, and end it.

    Raises:
        KvcqError: it does not start, is not what it should be, or a request to it fails.
    """
    if arm.bundle is None:
        _run_plain(arm, request, subject, measure, reporter)
    else:
        _run_bundle(arm, request, subject, machine, measure, reporter)


def arguments(request: ServeBenchRequest, subject: Subject) -> tuple[str, ...]:
    """Return the flags of SGLang that every arm gets: the user's, and what a benchmark needs besides."""
    given = read_given(request.arguments)
    found = [*subject.flags]
    if FRACTION not in given.values:
        # SGLang's own choice differs from backend to backend, and pools are compared.
        found += [flag(FRACTION), str(USUAL_FRACTION)]
    if not any(name.startswith(SIZES) for name in given.values):
        # A batch beyond the largest graph would be launched kernel by kernel.
        found += [flag(GRAPHS), str(request.max_running)]
    if request.filled:
        found += [OVERRIDES, json.dumps(given.overrides | {KEY: {FLAG: True}}, sort_keys=True)]
    return (*request.arguments, *found)


def plain_command(arm: Arm, request: ServeBenchRequest, subject: Subject, given: Given, port: int) -> tuple[str, ...]:
    """Return the command of a BF16 server: SGLang as it is, with the memory and the requests of the others."""
    options: dict[str, str | None] = {
        "model_path": subject.location,
        "host": HOST,
        "port": str(port),
        "context_length": None if request.max_context is None else str(request.max_context),
        "max_running_requests": str(request.max_running),
        "attention_backend": arm.backend,
        "dtype": request.dtype,
    }
    own = [part for name, value in options.items() if value is not None for part in (flag(name), value)]
    return (sys.executable, "-m", "sglang.launch_server", *given.tokens, *own)


def _run_plain(arm: Arm, request: ServeBenchRequest, subject: Subject, measure: Measure, reporter: Reporter) -> None:
    given = read_given(arguments(request, subject))
    port = free_port(HOST)

    def ready(child: Child, client: Client, stop: Callable[[float], None], seconds: float) -> None:
        record = check_plain(client.info(), arm) | {"seconds": round(seconds, 1)}
        measure(Running(arm, client.url, given.key, record["capacity"], record["most"], subject.bf16_cell, record))
        check_plain(client.info(), arm)
        stop(0.0)

    command = plain_command(arm, request, subject, given, port)
    watch(Start(command, HOST, port, given.key, request.start_seconds, 0.0), ready, reporter)


def check_plain(info: Mapping[str, Any], arm: Arm) -> dict[str, Any]:
    """Return what a BF16 server says of its cache.

    Raises:
        MismatchError: another attention backend or cache than the arm's, or no word of them.
    """
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    for name, legal in (("attention_backend", (arm.backend,)), ("kv_cache_dtype", ("auto", "bf16", "bfloat16"))):
        if state.get(name) not in legal:
            raise MismatchError(f"{name} is {shown(state.get(name))}, not {legal[0]}", where="/server_info")
    try:
        capacity = int(state["memory_usage"]["token_capacity"])
        most = int(state.get("effective_max_running_requests_per_dp") or state["max_running_requests"])
    except (KeyError, TypeError, ValueError):
        raise MismatchError("the server does not say how much its cache holds", where="/server_info") from None
    return {"capacity": capacity, "most": most, "memory": state["memory_usage"]}


def _run_bundle(
    arm: Arm, request: ServeBenchRequest, subject: Subject, machine: Machine, measure: Measure, reporter: Reporter
) -> None:
    path, bundle = subject.bundles[arm.name]
    given = arguments(request, subject)
    key = read_given(given).key

    def ready(server: Ready) -> None:
        record = server.record
        measure(Running(arm, server.url, key, record["capacity_tokens"], request.max_running, cell(bundle), record))
        with Client(HOST, int(server.url.rpartition(":")[2]), key) as client:
            check_after(client)
        server.stop(0.0)

    asked = SglangRequest(
        bundle=path,
        model=subject.model,
        dtype=request.dtype,
        host=HOST,
        port=0,
        max_context=request.max_context,
        max_running=request.max_running,
        arguments=given,
        start_seconds=request.start_seconds,
        grace=0.0,
    )
    serve_sglang(asked, reporter, ready, machine=machine, canary=not subject.synthetic, bench=True)


def cell(bundle: Bundle) -> int:
    """Return the bytes of a token in the pages of a bundle."""
    return round(kv_bytes_per_token(bundle.manifest.plan, bundle.manifest.geometry))
