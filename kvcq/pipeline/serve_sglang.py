"""serve with SGLang: everything that can be refused first, then the server as a process, then proof that it is on."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable

from kvcq.artifacts.bundle import Bundle
from kvcq.artifacts.verify import read_any
from kvcq.errors import InputError
from kvcq.pipeline.progress import SILENT, Reporter
from kvcq.pipeline.ready import Ready
from kvcq.pipeline.sglang.arguments import BENCH, OVERRIDES, build_command, read_given
from kvcq.pipeline.sglang.early import check_early
from kvcq.pipeline.sglang.machine import Machine, check_gpus, this_machine
from kvcq.pipeline.sglang.memory import plan_memory
from kvcq.pipeline.sglang.request import SglangRequest
from kvcq.runtime.sglang.facts import model_facts
from kvcq.runtime.sglang.flags import parse
from kvcq.runtime.sglang.gate import lock_of
from kvcq.runtime.sglang.refusals import refusals, refuse
from kvcq.runtime.sglang.settings import Settings


def serve_sglang(
    request: SglangRequest,
    reporter: Reporter = SILENT,
    on_ready: Callable[[Ready], None] | None = None,
    *,
    machine: Machine | None = None,
    canary: bool = True,
    bench: bool = False,
) -> int:
    """Serve until the server ends, a signal comes, or ``Ready.stop`` is called.

    Args:
        request: What and where.
        reporter: Receives progress, the server's own lines and the startup table.
        on_ready: Called once the server is up and has proven that the bundle is on.
        machine: What this machine has; None asks it.
        canary: Ask for the canary; without, only what the server says of itself is checked. For benchmarks with random
            weights, whose answers prove nothing.
        bench: The server may put random rows into its cache where a request asks for it, see
            `kvcq.runtime.sglang.filled`.

    Returns:
        The exit code of the server, as shells count it; 0 after ``Ready.stop``.

    Raises:
        InputError: not a bundle, a flag that SGLang does not take, a port in use.
        UnsupportedError: a flag or a model that 2-bit pages do not support.
        CorruptArtifactError: a damaged bundle.
        MismatchError: another model, a release of SGLang outside the window, or activation is not proven.
        ResourceError: no memory for the cache.
        UnavailableError: no SGLang or no GPU.
    """
    given = read_given(request.arguments)
    if BENCH in given.overrides and not bench:
        raise InputError(f"the key {BENCH} is for kvcq bench serve", where=OVERRIDES, fix="leave it out")
    _check_files(request)
    reporter.stage("verifying the bundle")
    bundle = _open_bundle(request)
    machine = machine or this_machine()
    ranks = given.number("tp_size", 1)
    check_gpus(machine, ranks)
    smallest = min(machine.gpus[:ranks], key=lambda gpu: gpu.memory)
    port = free_port(request.host, request.port)
    check_early(request, given, bundle, smallest)
    reporter.stage("checking the model")
    # Here: libraries of models take seconds to load, and what is refused above does not need them.
    from kvcq.pipeline.sglang.model import open_outline
    from kvcq.pipeline.sglang.running import Served, run

    outline = open_outline(request, given, bundle, reporter)
    token = secrets.token_hex(32)
    command = build_command(
        request, given, outline.location, port, _settings(request, bundle, token).plain(), machine.sglang
    )
    # The last word is the plugin's, in the server, with every flag as SGLang has resolved it.
    refuse(
        refusals(
            parse(command[3:]),
            model_facts(outline.config),
            geometry=bundle.manifest.geometry,
            identity=bundle.manifest.identity,
            plan=bundle.manifest.plan,
        )
    )
    memory = plan_memory(bundle, given, request.max_running, smallest, outline.weight_bytes, request.sink_entries)
    reporter.note(memory.line())
    served = Served(request, bundle, outline, machine, memory, canary)
    return run(served, command, port, given.key, token, on_ready, reporter)


def _open_bundle(request: SglangRequest) -> Bundle:
    found = read_any(request.bundle)
    if not isinstance(found, Bundle):
        raise InputError("not a bundle", where=request.bundle, fix="name a .kvcq that kvcq pack has written")
    return found


def _check_files(request: SglangRequest) -> None:
    """Refuse files that the server would look for in vain, minutes later."""
    if request.chat_template is not None and not request.chat_template.is_file():
        raise InputError("no such file", where=f"--chat-template {request.chat_template}")
    if request.trace is not None and not request.trace.resolve().parent.is_dir():
        raise InputError("its folder does not exist", where=f"--trace {request.trace}")


def free_port(host: str, port: int = 0) -> int:
    """Return the port, or a free one for port 0; somebody else may still take it until SGLang binds it.

    Raises:
        InputError: nobody can listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
            return int(trial.getsockname()[1])
    except (OSError, OverflowError) as error:
        raise InputError(f"cannot listen on {host}:{port}: {error}", where="--port", fix="use another, or 0") from None


def _settings(request: SglangRequest, bundle: Bundle, token: str) -> Settings:
    trace = None if request.trace is None else request.trace.resolve()
    return Settings(request.bundle.resolve(), bundle.manifest.digest, trace, request.sink_entries, gate=lock_of(token))
