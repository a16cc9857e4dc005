"""Every function of SGLang that the plugin hooks, and the proof that each hook is really in place.

SGLang only logs a hook whose target does not resolve and then serves plain BF16. So nothing here trusts that a hook
was registered: `verify` looks at the live function, and `end_process` ends the process where a hook is missing.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

from kvcq.errors import KvcqError, MismatchError
from kvcq.runtime.sglang.versions import INSTEAD, TESTED, Adapter, adapter

Kind = Literal["before", "after", "around"]


class Registry(Protocol):
    """What of ``sglang.srt.plugins.hook_registry.HookRegistry`` is used."""

    _patched: set[str]

    def register(self, target: str, hook: Callable[..., Any], hook_type: Any) -> None:
        """Remember a hook; `apply_hooks` puts it in place when all plugins have run."""


@dataclass(frozen=True)
class Hook:
    """One function of SGLang that the plugin wraps.

    Args:
        name: Key of kvcq's own function in the mapping given to `register`.
        target: Dotted path, as SGLang's registry takes it.
        kind: ``before`` gets the arguments, ``after`` the result and the arguments, ``around`` the original and the
            arguments.
        parameters: Names that kvcq's function relies on; the target has all of them.
        only: The way of building pools that has this target, None for all releases.
        why: What goes wrong without it.
    """

    name: str
    target: str
    kind: Kind
    parameters: tuple[str, ...]
    only: Adapter | None
    why: str


HOOKS = (
    Hook(
        "refuse",
        "sglang.srt.server_args.ServerArgs.check_server_args",
        "after",
        ("self",),
        None,
        "flags that 2-bit pages do not support would not be refused, and a server would answer before its proof",
    ),
    Hook(
        "size",
        "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator",
        "around",
        ("mr",),
        "mixin",
        "the pool would be sized for BF16 tokens",
    ),
    Hook(
        "size",
        "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator",
        "around",
        ("kvc",),
        "configurator",
        "the pool would be sized for BF16 tokens",
    ),
    Hook(
        "pool",
        "sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin._init_pools",
        "around",
        ("self",),
        "mixin",
        "the pool would hold BF16 rows",
    ),
    Hook(
        "pool",
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mha_kv_pool",
        "around",
        ("self", "max_total_num_tokens", "mha_pool_class"),
        "configurator",
        "the pool would hold BF16 rows",
    ),
    Hook(
        "match_cap",
        "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",
        "around",
        ("self", "input_len"),
        None,
        "a reused prefix would leave the recent window without exact rows",
    ),
    Hook(
        "sink_bind",
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc",
        "after",
        ("self", "reqs"),
        None,
        "requests would read the sink rows of others",
    ),
    Hook(
        "sink_unpin",
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free",
        "before",
        ("self", "req"),
        None,
        "sink rows would never be given back",
    ),
    Hook(
        "sink_clear",
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.clear",
        "after",
        ("self",),
        None,
        "sink rows of other weights could outlive a flush of the cache",
    ),
    Hook(
        "report",
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "after",
        ("self", "recv_req"),
        None,
        "a server could not tell which bundle it serves",
    ),
    Hook(
        "weights_disk",
        "sglang.srt.managers.tp_worker.BaseTpWorker.update_weights_from_disk",
        "around",
        ("self", "recv_req"),
        None,
        "weights could be replaced under a bundle that was fitted for others",
    ),
    Hook(
        "weights_tensor",
        "sglang.srt.managers.tp_worker.BaseTpWorker.update_weights_from_tensor",
        "around",
        ("self", "recv_req"),
        None,
        "weights could be replaced under a bundle that was fitted for others",
    ),
    Hook(
        "weights_distributed",
        "sglang.srt.managers.tp_worker.BaseTpWorker.update_weights_from_distributed",
        "around",
        ("self", "recv_req"),
        None,
        "weights could be replaced under a bundle that was fitted for others",
    ),
    Hook(
        "weights_ipc",
        "sglang.srt.managers.tp_worker.BaseTpWorker.update_weights_from_ipc",
        "around",
        ("self", "recv_req"),
        None,
        "weights could be replaced under a bundle that was fitted for others",
    ),
)


def hooks(version: str) -> tuple[Hook, ...]:
    """Return the hooks of one release of SGLang, one for each name.

    Raises:
        MismatchError: the release is outside the window.
    """
    way = adapter(version)
    return tuple(hook for hook in HOOKS if hook.only in (None, way))


def register(
    registry: Registry, kinds: Callable[[str], Any], functions: Mapping[str, Callable[..., Any]], version: str
) -> None:
    """Register kvcq's functions with SGLang, which puts them in place once all plugins have run.

    Args:
        registry: SGLang's ``HookRegistry``.
        kinds: Its ``HookType``, called with ``before``, ``after`` or ``around``.
        functions: kvcq's function for each name of `HOOKS`.
        version: Release of SGLang.

    Raises:
        MismatchError: the release is outside the window.
        KeyError: `functions` lacks a name; nothing is registered then.
    """
    pairs = [(hook, functions[hook.name]) for hook in hooks(version)]
    for hook, function in pairs:
        registry.register(hook.target, function, kinds(hook.kind))


def verify(registry: Registry, functions: Mapping[str, Callable[..., Any]], version: str) -> None:
    """Check that every hook is in place: SGLang applied it, and the live function is wrapped by kvcq's.

    Called where a server starts (the launcher) and where it attends (the scheduler, before its backend is built), not
    while plugins load: SGLang applies hooks after the last of them.

    Args:
        registry: SGLang's ``HookRegistry``.
        functions: As given to `register`.
        version: Release of SGLang.

    Raises:
        MismatchError: a hook was not applied, its target is gone, is not wrapped by kvcq's function, or lost a
            parameter; the line names the hook, the release and what would go wrong.
    """
    for hook in hooks(version):
        applied = hook.target in registry._patched
        fault = _fault(hook, functions[hook.name]) if applied else "SGLang did not apply it"
        if fault is not None:
            raise MismatchError(
                f"the hook {hook.name} of SGLang {version} is not in place, {fault}; {hook.why}",
                where=hook.target,
                fix=f"install 'sglang=={TESTED}' and no other plugin that replaces it, {INSTEAD}",
            )


def _fault(hook: Hook, function: Callable[..., Any]) -> str | None:
    try:
        live = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    if not any(held is function for held in _wrappers(live)):
        return "its target is the plain function"
    missing = [name for name in hook.parameters if name not in inspect.signature(inspect.unwrap(live)).parameters]
    return f"its target has no parameter {', '.join(missing)}" if missing else None


def _wrappers(live: Any) -> Iterator[Any]:
    """Yield what the wrappers around a function hold: SGLang's wrapper closes over the hook that it calls."""
    while hasattr(live, "__wrapped__"):
        yield from (cell.cell_contents for cell in getattr(live, "__closure__", None) or ())
        live = live.__wrapped__


def end_process(error: KvcqError) -> NoReturn:
    """Print the one line of an error and end the process with its exit code.

    A scheduler ends at once: SGLang turns every exception there into a traceback and a signal to its parent, and its
    other threads would keep the process alive. A launcher, which may be somebody's own program, gets a `SystemExit`.
    """
    print(f"error: {error}", file=sys.stderr, flush=True)
    if multiprocessing.parent_process() is not None:
        os._exit(error.exit_code)
    raise SystemExit(error.exit_code)
