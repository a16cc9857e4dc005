"""The entry point ``kvcq`` of the group ``sglang.srt.plugins``: what each process of a server runs first.

It makes the backend's name known and registers hooks; all of them do nothing in a server that attends with another
backend. With ``--attention-backend kvcq`` the launcher refuses what is not served before weights load, and a scheduler
checks, where its backend is built, that every hook is in place and the pool is of this bundle. A fault ends the process
with one line and its exit code: SGLang would only log it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvcq.artifacts.bundle import Bundle
from kvcq.errors import KvcqError, UnsupportedError, shown
from kvcq.models.fingerprint import build_provenance
from kvcq.runtime.sglang import admission, gate, metrics, versions
from kvcq.runtime.sglang.attend import Attention
from kvcq.runtime.sglang.backend import NAME, make_backend_class
from kvcq.runtime.sglang.begins import prepare_layers
from kvcq.runtime.sglang.configurator import PoolPlan, make_configurator, pool_plan
from kvcq.runtime.sglang.facts import model_facts
from kvcq.runtime.sglang.filled import TARGET, Filler
from kvcq.runtime.sglang.flags import environment
from kvcq.runtime.sglang.hooks import end_process, register, verify
from kvcq.runtime.sglang.later import Later
from kvcq.runtime.sglang.layers import layer_tables
from kvcq.runtime.sglang.pool import check_pool, make_pool_class
from kvcq.runtime.sglang.refusals import refusals, refuse
from kvcq.runtime.sglang.settings import FLAG, KEY, Settings, overrides
from kvcq.runtime.sglang.trace import Trace
from kvcq.spec.identity import Provenance
from kvcq.version import __version__


@dataclass
class _Process:
    """What this process knows of its server.

    Attributes:
        opened: Settings, bundle and pool plan, once they are asked for.
        pools: Pools that were built.
        attention: Of its layers, once built.
        clamped: Its count of clamped values, as the host hears of it.
        trace: Where boundaries are noted.
        filler: Fills contexts for benchmarks, where the server was started for it.
    """

    opened: tuple[Settings, Bundle, PoolPlan] | None = None
    pools: list[Any] = field(default_factory=list)
    attention: Attention | None = None
    clamped: Later | None = None
    trace: Trace | None = None
    filler: Filler = field(default_factory=Filler)


_PROCESS = _Process()


def selected(args: Any) -> bool:
    """Tell whether a server attends with kvcq, for prefill or decode."""
    fields = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return any(getattr(args, name, None) == NAME for name in fields)


def refuse_flags(result: Any, self: Any) -> None:
    """After ``ServerArgs.check_server_args``: end the launcher where something is asked for that is not served."""
    if not selected(self):
        with _ending():
            refuse_stray(self)
        return
    from sglang.srt.environ import envs
    from sglang.srt.plugins.hook_registry import HookRegistry

    with _ending():
        verify(HookRegistry, FUNCTIONS, versions.require())
        config = self.get_model_config()
        settings = Settings.of_config(config.hf_config)
        manifest = settings.open().manifest
        facts = model_facts(config.hf_config.to_dict(), config)
        variables = environment(envs)
        refuse(
            refusals(
                self,
                facts,
                geometry=manifest.geometry,
                identity=manifest.identity,
                plan=manifest.plan,
                environment=variables,
            )
        )
        _warn_of_weights(manifest.provenance, getattr(self, "model_path", None))
        if settings.gate is not None:
            # SGLang checks in the launcher, which listens later; its module of HTTP has no need to load elsewhere.
            from sglang.srt.entrypoints import http_server

            gate.place(http_server, self, settings.gate)


def refuse_stray(args: Any) -> None:
    """Refuse a server that was told of a bundle and does not attend with it: its cache would be BF16 without a word.

    Raises:
        UnsupportedError: for that.
    """
    if KEY in overrides(getattr(args, "json_model_override_args", None)):
        raise UnsupportedError(
            f"a bundle is named, but attention runs on {shown(getattr(args, 'attention_backend', None))}",
            where=FLAG,
            fix=f"add --attention-backend {NAME}, or leave the key {KEY!r} out",
        )


def size(original: Callable[[Any], Any], host: Any) -> Any:
    """Around ``create_memory_pool_configurator``: size the pool by its 2-bit tokens."""
    if not selected(host.server_args):
        return original(host)
    with _ending():
        return make_configurator(_open(host)[2])


def pool(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around what builds the pool of keys and values: have it build ours."""
    if not selected(self.server_args):
        return original(self, *args, **kwargs)
    with _ending():
        made = make_pool_class(_open(self)[2], self.model_config.dtype)
    if "mha_pool_class" in kwargs:
        built = original(self, *args, **{**kwargs, "mha_pool_class": made})
        _install(built)
        return built
    from sglang.srt.model_executor import model_runner_kv_cache_mixin as module

    plain = module.MHATokenToKVPool
    module.MHATokenToKVPool = made
    try:
        result = original(self, *args, **kwargs)
    finally:
        module.MHATokenToKVPool = plain
    _install(self.token_to_kv_pool)
    return result


def match_cap(original: Callable[..., int], self: Any, input_len: int) -> int:
    """Around ``Req._compute_max_prefix_len``; see `admission.match_cap`."""
    if not _PROCESS.pools:
        return original(self, input_len)
    with _ending():
        return admission.match_cap(original, self, input_len)


def sink_bind(result: list[int] | None, self: Any, reqs: Sequence[Any]) -> None:
    """After ``ReqToTokenPool.alloc``; see `admission.sink_bind`."""
    if _PROCESS.pools:
        with _ending():
            admission.sink_bind(result, self, reqs)
        _count()


def sink_unpin(self: Any, req: Any) -> None:
    """Before ``ReqToTokenPool.free``; see `admission.sink_unpin`."""
    if not _PROCESS.pools:
        return
    if _PROCESS.trace is not None and _PROCESS.trace.active and req.req_pool_idx is not None:
        page = _PROCESS.pools[0].page_size
        pages = (self.req_to_token[req.req_pool_idx, ::page] // page).tolist()
        _PROCESS.trace.finish(req.rid, req.kv_committed_len, pages)
    with _ending():
        admission.sink_unpin(self, req)
    _count()


def sink_clear(result: None, self: Any) -> None:
    """After ``ReqToTokenPool.clear``; see `admission.sink_clear`."""
    if _PROCESS.pools:
        admission.sink_clear(result, self)
        _count()


def fill(self: Any, tree_cache: Any = None, *args: Any, **kwargs: Any) -> None:
    """Before ``Req.init_next_round_input``, with any attention backend; see `filled`."""
    _PROCESS.filler.before(self, tree_cache, _PROCESS.pools[0].store if _PROCESS.pools else None)


def report(result: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """After ``Scheduler.get_internal_state``; see `metrics.report`. Waits for the device: it is asked rarely."""
    meters = metrics.published()
    if meters is not None and _PROCESS.attention is not None:
        meters.clamp(int(_PROCESS.attention.clamped))
    return metrics.report(result)


def keep_weights(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """Around ``BaseTpWorker.update_weights_from_*``: answer as SGLang answers what fails, and load nothing."""
    if not _PROCESS.pools:
        return original(self, recv_req)
    return False, "kvcq: the bundle was fitted for the loaded weights; start a server with a bundle for the new ones"


# The function of each hook, by the names of `hooks.HOOKS`.
FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "refuse": refuse_flags,
        "size": size,
        "pool": pool,
        "match_cap": match_cap,
        "sink_bind": sink_bind,
        "sink_unpin": sink_unpin,
        "sink_clear": sink_clear,
        "report": report,
        "weights_disk": keep_weights,
        "weights_tensor": keep_weights,
        "weights_distributed": keep_weights,
        "weights_ipc": keep_weights,
    }
)


def make_backend(runner: Any) -> Any:
    """Build the backend of a scheduler, once everything that it rests on has been checked.

    Ends the process where a hook is not in place, the pool is not ours or of another bundle, or there is no kernel.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    with _ending():
        version = versions.require()
        verify(HookRegistry, FUNCTIONS, version)
        settings, bundle, plan = _open(runner)
        held, table = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
        # The layers of one stage of a pipeline; what SGLang means by the end of one differs from pool to pool.
        local = plan.stage(held.start_layer, held.start_layer + held.layer_num)
        check_pool(held, bundle.manifest.digest, local.cell, table.shape[0])
        tp, rank = _attention_ranks()
        manifest = bundle.manifest
        tables = layer_tables(
            manifest.plan,
            manifest.geometry,
            bundle.tensors,
            tp=tp,
            rank=rank,
            dtype=runner.model_config.dtype,
            device=table.device,
            only=held.caches,
        )
        heads, chunk = runner.model_config.num_attention_heads // tp, runner.server_args.chunked_prefill_size
        longest = min(chunk, table.shape[1]) if chunk and chunk > 0 else table.shape[1]
        attention = Attention(
            tables,
            held.caches,
            table,
            held.windows.exact_from,
            q_heads=heads,
            max_batch=runner.req_to_token_pool.size,
            library=prepare_layers(manifest.geometry.layers, tables, heads, table.device, longest),
        )
        # One rank's trace is that of all: they decide alike.
        trace = None if settings.trace is None or rank else Trace.open(settings.trace)
        _PROCESS.attention, _PROCESS.clamped, _PROCESS.trace = attention, Later(attention.clamped), trace
        metrics.publish(_facts(manifest, version, held, local, attention, rank, tp), metrics=_collects(runner))
    return make_backend_class()(runner, attention, trace)


def activate() -> None:
    """Make the backend known to SGLang and register the hooks; called once in every process.

    A release of SGLang outside of the window is told in one line, and left alone: it then knows no backend ``kvcq``.
    """
    try:
        version = versions.require()
    except KvcqError as error:
        print(f"kvcq is not loaded: {error}", file=sys.stderr, flush=True)
        return
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    with _ending():
        server_args.add_attention_backend_choices([NAME])
        register_attention_backend(NAME)(make_backend)
        register(HookRegistry, HookType, FUNCTIONS, version)
        # Not one of those that serving rests on: nobody verifies it but a benchmark, by what was found in the cache.
        HookRegistry.register(TARGET, fill, HookType("before"))


def _open(host: Any) -> tuple[Settings, Bundle, PoolPlan]:
    """Return settings, bundle and plan, read once; `host` is a model runner or its configurator of caches."""
    if _PROCESS.opened is None:
        settings = Settings.of_config(host.model_config.hf_config)
        bundle = settings.open()
        manifest = bundle.manifest
        plan = pool_plan(
            manifest.plan,
            manifest.geometry,
            manifest.recipe.windows,
            digest=manifest.digest,
            tp=_attention_ranks()[0],
            requests=host.server_args.max_running_requests,
            entries=settings.sink_entries,
        )
        _PROCESS.opened = (settings, bundle, plan)
    return _PROCESS.opened


def _warn_of_weights(fitted: Provenance, location: Any) -> None:
    """Tell where local weight files are not those that the bundle was fitted on; a hub's are not looked for."""
    if not fitted.weights or not isinstance(location, str) or not Path(location).is_dir():
        return
    try:
        found = build_provenance(Path(location).name, folder=Path(location)).weights
    except OSError:
        return
    if found and found != fitted.weights:
        line = f"warning: kvcq: the bundle was fitted on other weights ({fitted.source}, not {Path(location).name})"
        print(line, file=sys.stderr, flush=True)


def _install(built: Any) -> None:
    with _ending():
        # Another pool than ours: the backend's factory says so.
        if hasattr(built, "store"):
            admission.install(built.store)
            _PROCESS.pools.append(built)


def _attention_ranks() -> tuple[int, int]:
    """Return how many ranks share attention, and which this is."""
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError:
        # 0.5.13 has no such module.
        from sglang.srt.layers.dp_attention import get_attention_tp_rank, get_attention_tp_size

        return get_attention_tp_size(), get_attention_tp_rank()
    parallel = get_parallel()
    return parallel.attn_tp_size, parallel.attn_tp_rank


def _facts(
    manifest: Any, version: str, held: Any, plan: PoolPlan, attention: Attention, rank: int, ranks: int
) -> metrics.Facts:
    return metrics.Facts(
        digest=manifest.digest,
        method=manifest.recipe.method,
        kvcq=__version__,
        sglang=version,
        bytes_per_token=held.bytes_per_token,
        window_bytes=plan.request_bytes,
        capacity=held.size,
        running=plan.requests,
        sinks=plan.entries,
        rank=rank,
        ranks=ranks,
        kernels=attention.kernels,
    )


def _collects(runner: Any) -> bool:
    return bool(runner.server_args.enable_metrics)


def _count() -> None:
    """Show what is in use, whenever a request begins or ends."""
    meters = metrics.published()
    if meters is not None:
        held = _PROCESS.pools[0].store.occupancy
        meters.occupancy(held.rows, held.pinned, held.cached)
        if _PROCESS.clamped is not None and (total := _PROCESS.clamped.poll()) is not None:
            meters.clamp(total)


@contextmanager
def _ending() -> Iterator[None]:
    """End the process with one line where kvcq refuses: SGLang would log it, or serve on."""
    try:
        yield
    except KvcqError as error:
        end_process(error)
