"""Proof that a running SGLang reads this bundle: what its scheduler says, and how it answers the canary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvcq.artifacts.bundle import Bundle
from kvcq.errors import EvaluationError, MismatchError, shown
from kvcq.evaluation.canary import ACTIVE, canary_boundary, canary_statistic, canary_verdict
from kvcq.pipeline.sglang.client import Client
from kvcq.pipeline.sglang.memory import Memory
from kvcq.runtime.layout import PAGE
from kvcq.runtime.sglang.metrics import FALLBACK, KEY

AGAIN = "update kvcq and SGLang together, or serve this bundle with --engine hf"


@dataclass(frozen=True)
class Proof:
    """What the running server has shown.

    Attributes:
        statistic: Canary statistic: near 1 when the cache is quantized as recorded, near 0 when it is not; None where
            the canary was not asked.
        cached: Tokens of a canary passage that were read from the radix cache.
        capacity: Tokens of the pool.
        bytes_per_token: Of all ranks, equal to the arithmetic of `kvcq.runtime.layout`.
        kernels: What attends, by layer.
        record: What the first scheduler said.
    """

    statistic: float | None
    cached: int
    capacity: int
    bytes_per_token: int
    kernels: dict[int, str]
    record: dict[str, Any]


def prove(client: Client, bundle: Bundle, memory: Memory, *, canary: bool = True) -> Proof:
    """Ask a server that is up.

    Args:
        client: Asks it.
        bundle: What it is to serve.
        memory: What its cache must be.
        canary: Ask the canary too. Random weights answer noise: of them only what the schedulers say can be checked.

    Raises:
        MismatchError: anything that it says or answers is not what this bundle gives; nothing that it answers can be
            trusted then.
    """
    try:
        records = _records(client.info())
        for record in records:
            check_record(record, bundle, memory)
        statistic, cached = _ask_canary(client, bundle) if canary else (None, 0)
        check_after(client)
    except EvaluationError as error:
        raise MismatchError(error.what, where=error.where, fix=AGAIN) from error
    first = records[0]
    return Proof(
        statistic=statistic,
        cached=cached,
        capacity=min(int(record["capacity"]) for record in records),
        bytes_per_token=int(first["bytes_per_token"]) * memory.ranks,
        kernels={int(layer): str(name) for layer, name in first["kernels"].items()},
        record=first,
    )


def check_after(client: Client) -> None:
    """Compare what a server says once it has answered with what it must: no attention went past the kernels.

    Raises:
        MismatchError: some did.
        EvaluationError: no answer.
    """
    for record in _records(client.info()):
        _check_fallbacks(record)


def check_record(record: Mapping[str, Any], bundle: Bundle, memory: Memory) -> None:
    """Compare what a scheduler says of its cache with the bundle.

    Args:
        record: As `kvcq.runtime.sglang.metrics.Meters.plain` makes it.
        bundle: What is to be served.
        memory: What its cache must be.

    Raises:
        MismatchError: anything differs, or attention did not take the kernels.
    """
    manifest = bundle.manifest
    pool = memory.pool
    for what, name, wanted in (
        ("the digest of the bundle", "digest", manifest.digest),
        ("bytes of a token", "bytes_per_token", pool.cell),
        ("bytes of the exact rows of a request", "window_bytes", pool.request_bytes),
        ("requests at once", "running", pool.requests),
        ("entries of sinks", "sinks", pool.entries),
        ("ranks", "ranks", memory.ranks),
    ):
        if record.get(name) != wanted:
            _differ(f"{what}: the server has {shown(record.get(name))}, not {shown(wanted)}", "/server_info")
    kernels = record.get("kernels")
    layers = {str(entry.layer) for entry in manifest.plan if entry.quantized}
    if not isinstance(kernels, dict) or set(kernels) != layers:
        _differ("the server does not name a kernel for each layer of the bundle", "/server_info")
    if slow := [layer for layer, name in kernels.items() if str(name).startswith(FALLBACK)]:
        _differ(f"layer {slow[0]} attends with {FALLBACK}, not with a kernel of the bundle", "/server_info")
    capacity = record.get("capacity")
    if not isinstance(capacity, int) or capacity < PAGE:
        _differ(f"a pool of {shown(capacity)} tokens", "/server_info")
    _check_fallbacks(record)


def _records(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what the plugin in each scheduler has added to SGLang's own account."""
    states = info.get("internal_states")
    if not isinstance(states, list) or not states:
        _differ("the server says nothing of its schedulers", "/server_info")
    found = []
    for number, state in enumerate(states):
        record = state.get(KEY) if isinstance(state, dict) else None
        if not isinstance(record, dict):
            _differ("the plugin is not on: this scheduler does not know kvcq", f"scheduler {number}")
        found.append(record)
    return found


def _check_fallbacks(record: Mapping[str, Any]) -> None:
    fallbacks = record.get("fallbacks")
    if fallbacks != {}:
        _differ(f"attention without the kernels of the bundle: {shown(fallbacks)}", "/server_info")


def _ask_canary(client: Client, bundle: Bundle) -> tuple[float, int]:
    """Let the server read each passage behind a cached prefix, as it was recorded, and then again from its own cache.

    The last reading, of whole pages and one token, finds all but that token in the radix tree. Without the hook that
    caps the match it would leave the recent window without exact rows: that it does not is shown here and nowhere else.
    """
    canary, windows = bundle.canary, bundle.manifest.recipe.windows
    boundary = canary_boundary(windows)
    prefix = boundary // PAGE * PAGE
    again = (canary["tokens"].shape[1] - 1) // PAGE * PAGE + 1
    most = (again - max(windows.recent, 1)) // PAGE * PAGE
    answers = []
    for passage, ids in zip(canary["tokens"].tolist(), canary["ids"], strict=True):
        client.score(passage[:boundary])
        answer = client.score(passage, boundary, sorted(set(ids.flatten().tolist())))
        if answer.cached != prefix:
            _differ(f"{answer.cached} tokens of the canary were read from the cache, not {prefix}", "radix cache")
        answers.append(_gather(answer.rows, canary["positions"] - boundary, ids))
        if (found := client.score(passage[:again]).cached) != most:
            _differ(f"a repeated prompt of {again} tokens reused {found}, not {most}", "match cap")
    statistic = canary_statistic(np.stack(answers), canary["b"], canary["s"])
    if canary_verdict(statistic) != "active":
        _differ(
            f"the cache does not answer as this bundle does: canary {statistic:.2f}, active is {ACTIVE} or more", KEY
        )
    return statistic, prefix


def _gather(rows: list[dict[int, float]], places: NDArray, ids: NDArray) -> NDArray:
    """Return log-probs [n, 32] of the recorded ids at the recorded positions."""
    try:
        return np.array(
            [[rows[place][token] for token in row] for place, row in zip(places.tolist(), ids.tolist(), strict=True)]
        )
    except (IndexError, KeyError):
        raise EvaluationError("the server's log-probs are incomplete", where="/generate") from None


def _differ(what: str, where: str) -> NoReturn:
    raise MismatchError(what, where=where, fix=AGAIN)
