"""The command line of SGLang: what a user adds, what kvcq sets, and where the two contradict."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcq.errors import InputError, shown
from kvcq.pipeline.sglang.request import SglangRequest
from kvcq.runtime.layout import PAGE
from kvcq.runtime.sglang.versions import TESTED

BACKEND = "kvcq"
OVERRIDES = "--json-model-override-args"
# That of `kvcq.runtime.sglang.filled`, which loads torch; the tests hold them equal.
BENCH = "kvcq_bench"
# Other spellings of a field of ServerArgs; `--tp` is an abbreviation that everybody writes.
ALIASES = {
    "model": "model_path",
    "tensor_parallel_size": "tp_size",
    "tp": "tp_size",
    "data_parallel_size": "dp_size",
    "dp": "dp_size",
    "pipeline_parallel_size": "pp_size",
    "pp": "pp_size",
}
SERVE = "serve"
# What kvcq serve has options of its own for.
OWN = {
    "model_path": "--model",
    "revision": "--revision",
    "trust_remote_code": "--trust-remote-code",
    "host": "--host",
    "port": "--port",
    "served_model_name": "--served-name",
    "chat_template": "--chat-template",
    "context_length": "--max-context",
    "max_running_requests": "--max-running",
    "dtype": "--dtype",
}
# What would keep the proof from being asked, and why.
UNPROVABLE = {
    "config": "kvcq serve checks flags, and a file could contradict them",
    "tokenizer_path": "the bundle belongs to the model with its own tokenizer",
    "disable_radix_cache": "the proof reads a prefix from the radix cache",
    "ssl_keyfile": "the proof is asked over plain HTTP",
    "ssl_certfile": "the proof is asked over plain HTTP",
    "grpc_mode": "the proof is asked over HTTP",
    "encoder_only": "it attends to no cache",
    "enable_http2": "it may answer before the proof",
    "grpc_port": "it would answer before the proof",
    "use_ray": "kvcq serve watches one process tree",
    "skip_tokenizer_init": "answers would have no text",
}
SET = {"page_size": str(PAGE), "attention_backend": BACKEND}
MANY = {
    "dp_size": "ranks of data parallelism share no prefix",
    "nnodes": "kvcq serve watches one machine",
    "tokenizer_worker_num": "its processes would answer before the proof",
}

# Whose values are in no record.
KEYS = ("--api-key", "--admin-api-key")
SECRET = re.compile(r"--(?:.*[-_])?(?:key|password|secret|token)")
HIDDEN = "***"
# What chooses a kind of prefill graphs; none of them was ever run with 2-bit pages, so they are off otherwise.
GRAPHS = ("cuda_graph_backend_prefill", "enable_breakable_cuda_graph", "enforce_piecewise_cuda_graph")


@dataclass(frozen=True)
class Given:
    """The arguments that a user has added for SGLang.

    Attributes:
        tokens: As given.
        values: By field of ``ServerArgs``: True for a bare flag, a number, text, or a tuple of several.
    """

    tokens: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def overrides(self) -> dict[str, Any]:
        """Fields of the model's configuration to replace, without kvcq's own."""
        return _overrides(self.values.get("json_model_override_args", "{}"))

    @property
    def key(self) -> str | None:
        """Token that requests to the server must carry."""
        value = self.values.get("api_key")
        return None if value is None or value is True else str(value)

    def number(self, name: str, default: int) -> int:
        """Return a whole number.

        Raises:
            InputError: it is none.
        """
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{shown(value)} is not a number", where=flag(name))
        return value


def masked(tokens: Sequence[str]) -> list[str]:
    """Return flags as they may be written down: keys, passwords and tokens are not shown."""
    found, secret = [], False
    for token in tokens:
        if token.startswith("--"):
            name, equals, _ = token.partition("=")
            # The parser of SGLang takes the beginning of a flag for all of it.
            secret = SECRET.fullmatch(name) is not None or any(known.startswith(name) for known in KEYS)
            found.append(f"{name}={HIDDEN}" if secret and equals else token)
        else:
            found.append(HIDDEN if secret else token)
    return found


def flag(name: str) -> str:
    """Return the flag of a field of ``ServerArgs``."""
    return "--" + name.replace("_", "-")


def read_given(tokens: Sequence[str], command: str = SERVE, own: Mapping[str, str] = OWN) -> Given:
    """Read what a user has added, and refuse what kvcq sets itself or what makes the proof impossible.

    SGLang parses it again with its own types; the plugin refuses there what no list here knows of.

    Args:
        tokens: As given.
        command: Of kvcq, that they were given to.
        own: Its own options by the field that they set.

    Raises:
        InputError: not a flag, or one that contradicts.
    """
    values: dict[str, Any] = {}
    name = ""
    for token in tokens:
        if token.startswith("--"):
            name, equals, text = token[2:].partition("=")
            name = name.replace("-", "_")
            name = ALIASES.get(name, name)
            values[name] = _value(text) if equals else True
        elif not name:
            raise InputError(f"{shown(token)} is not a flag of SGLang", where="--", fix="write flags of SGLang there")
        else:
            values[name] = _joined(values[name], _value(token))
    given = Given(tuple(tokens), values)
    _refuse(given, command, own)
    return given


def build_command(
    request: SglangRequest,
    given: Given,
    location: str,
    port: int,
    settings: Mapping[str, Any],
    release: str = TESTED,
) -> tuple[str, ...]:
    """Return the command of the server; what kvcq sets comes last, so that nothing before it wins.

    Args:
        request: What to serve.
        given: What the user adds.
        location: Folder or hub id of the model.
        port: To listen on.
        settings: What the plugin reads from the model's configuration, under the key ``kvcq``.
        release: Of SGLang.
    """
    overrides = json.dumps(given.overrides | {BACKEND: dict(settings)}, sort_keys=True)
    options: dict[str, str | None] = {
        "model_path": location,
        "revision": request.revision,
        "host": request.host,
        "port": str(port),
        "served_model_name": request.served_name,
        "chat_template": None if request.chat_template is None else str(request.chat_template.resolve()),
        "context_length": None if request.max_context is None else str(request.max_context),
        "dtype": request.dtype,
        "max_running_requests": str(request.max_running),
        **SET,
        "json_model_override_args": overrides,
    }
    own = [part for name, value in options.items() if value is not None for part in (flag(name), value)]
    own += [] if any(name in given.values for name in GRAPHS) else _no_prefill_graphs(release)
    # SGLang would ask itself without the token of the gate: the proof warms it up.
    bare = ["--enable-metrics", "--skip-server-warmup"] + (["--trust-remote-code"] if request.trust_remote_code else [])
    return (sys.executable, "-m", "sglang.launch_server", *given.tokens, *own, *bare)


def _no_prefill_graphs(release: str) -> list[str]:
    """Return the flag that turns graphs of prefills off; 0.5.13 has a switch for the one kind that it knows."""
    early = release.split(".")[:3] == ["0", "5", "13"]
    return ["--disable-piecewise-cuda-graph"] if early else ["--cuda-graph-backend-prefill", "disabled"]


def _value(text: str) -> Any:
    return int(text) if text.isdecimal() and text.isascii() else text


def _joined(before: Any, value: Any) -> Any:
    if before is True:
        return value
    return (*before, value) if isinstance(before, tuple) else (before, value)


def _refuse(given: Given, command: str, own: Mapping[str, str]) -> None:
    for name, value in given.values.items():
        if name in OWN:
            fix = f"use {own[name]}, before --" if name in own else "leave it out"
            raise InputError(f"{flag(name)} is set by kvcq {command}", where="--", fix=fix)
        if name in UNPROVABLE:
            raise InputError(f"{flag(name)} is not possible: {UNPROVABLE[name]}", where=flag(name), fix="leave it out")
        if name in SET and str(value) != SET[name]:
            raise InputError(
                f"{flag(name)} {shown(value)} is not possible with 2-bit pages",
                where=flag(name),
                fix=f"leave it out: it is {SET[name]}",
            )
        if name in MANY and value != 1:
            raise InputError(f"{flag(name)} {shown(value)} is not possible: {MANY[name]}", where=flag(name))
    if BACKEND in given.overrides:
        raise InputError(f"the key {BACKEND} is set by kvcq {command}", where=OVERRIDES, fix="leave it out")


def _overrides(text: Any) -> dict[str, Any]:
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{shown(text)} is not a JSON object", where=OVERRIDES)
    return found
