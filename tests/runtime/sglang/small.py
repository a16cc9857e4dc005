"""SGLang in the small: the modules that the plugin imports or hooks, with the parameters of the real ones.

`test_small` holds the parameters against the sources of every release.
"""

from __future__ import annotations

import enum
import functools
import pkgutil
import sys
import types
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

SIGNATURES = (
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata_out_graph",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata_in_graph",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_cuda_graph_state",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.get_cuda_graph_seq_len_fill_value",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward_decode",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward_extend",
    "sglang.srt.layers.attention.attention_registry.register_attention_backend",
    "sglang.srt.server_args.add_attention_backend_choices",
    "sglang.srt.mem_cache.memory_pool.KVCache.__init__",
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc",
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free",
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.clear",
    "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",
    "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
    "sglang.srt.managers.tp_worker.BaseTpWorker.update_weights_from_disk",
    "sglang.srt.managers.tp_worker.BaseTpWorker.update_weights_from_tensor",
    "sglang.srt.managers.tp_worker.BaseTpWorker.update_weights_from_distributed",
    "sglang.srt.managers.tp_worker.BaseTpWorker.update_weights_from_ipc",
    "sglang.srt.server_args.ServerArgs.check_server_args",
    "sglang.srt.server_args.ServerArgs.get_model_config",
)


class HookType(enum.Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"


def make_registry() -> type:
    class HookRegistry:
        """Applies hooks as the real one does, and swallows what goes wrong."""

        hooks: list[tuple[str, Any, HookType]] = []  # noqa: RUF012
        _patched: set[str] = set()  # noqa: RUF012

        @classmethod
        def register(cls, target, hook, hook_type):
            cls.hooks.append((target, hook, hook_type))

        @classmethod
        def apply_hooks(cls):
            for target, hook, kind in cls.hooks:
                owner_path, _, name = target.rpartition(".")
                try:
                    owner = pkgutil.resolve_name(owner_path)
                    setattr(owner, name, wrap(getattr(owner, name), hook, kind))
                except (ImportError, AttributeError):
                    continue
                cls._patched.add(target)

    return HookRegistry


def wrap(original_fn, hook, kind):
    @functools.wraps(original_fn)
    def wrapper(*args, **kwargs):
        if kind is HookType.AROUND:
            return hook(original_fn, *args, **kwargs)
        if kind is HookType.BEFORE:
            args, kwargs = hook(*args, **kwargs) or (args, kwargs)
            return original_fn(*args, **kwargs)
        result = original_fn(*args, **kwargs)
        changed = hook(result, *args, **kwargs)
        return result if changed is None else changed

    return wrapper


class Mode(enum.Enum):
    """``ForwardMode``."""

    EXTEND = "extend"
    DECODE = "decode"
    IDLE = "idle"
    MIXED = "mixed"
    TARGET_VERIFY = "verify"

    def is_decode(self):
        return self is Mode.DECODE

    def is_idle(self):
        return self is Mode.IDLE

    def is_extend(self):
        return self not in (Mode.DECODE, Mode.IDLE)

    def is_mixed(self):
        return self is Mode.MIXED


class AttentionBackend:
    def init_forward_metadata(self, forward_batch):
        raise AssertionError("not overridden")

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        raise AssertionError("not overridden")

    def init_forward_metadata_in_graph(self, forward_batch):
        raise AssertionError("not overridden")

    needs_cpu_seq_lens = True

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        raise AssertionError("not overridden")

    def get_cuda_graph_seq_len_fill_value(self):
        raise AssertionError("not overridden")

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        run = self.forward_decode if forward_batch.forward_mode.is_decode() else self.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        raise AssertionError("not overridden")

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        raise AssertionError("not overridden")


class KVCache:
    def __init__(
        self, size, page_size, dtype, layer_num, device, enable_memory_saver, start_layer=None, end_layer=None
    ):
        self.size, self.page_size, self.dtype, self.store_dtype = size, page_size, dtype, dtype
        self.layer_num, self.device, self.start_layer = layer_num, device, start_layer or 0
        self.end_layer = end_layer or layer_num - 1


class PlainPool(KVCache):
    """Stands for ``MHATokenToKVPool``: BF16 rows."""

    def __init__(self, size, page_size, dtype, head_num, head_dim, layer_num, device, enable_memory_saver, **others):
        super().__init__(size, page_size, dtype, layer_num, device, enable_memory_saver)


def make_request_pool() -> type:
    class ReqToTokenPool:
        def __init__(self, size, max_context_len):
            self.size = size
            self.req_to_token = torch.zeros(size + 1, max_context_len, dtype=torch.int32)
            self.free_slots = list(range(1, size + 1))

        def alloc(self, reqs):
            for req in reqs:
                if req.req_pool_idx is None:
                    req.req_pool_idx = self.free_slots.pop(0)
            return [req.req_pool_idx for req in reqs]

        def free(self, req):
            self.free_slots.append(req.req_pool_idx)
            req.req_pool_idx = None

        def clear(self):
            self.free_slots = list(range(1, self.size + 1))

    return ReqToTokenPool


def make_req() -> type:
    @dataclass(eq=False)
    class Req:
        rid: str
        tokens: list[int]
        prefix_indices: Any = ()
        req_pool_idx: int | None = None
        extra_key: str | None = None
        input_embeds: Any = None
        positional_embed_overrides: Any = None
        extend_range: Any = None
        kv_committed_len: int = 0

        @property
        def full_untruncated_fill_ids(self):
            return self.tokens

        def _compute_max_prefix_len(self, input_len):
            return input_len - 1

    return Req


def make_runner(configurator: bool) -> type:
    """The model runner with its way of building the pool: its own method, or that of a configurator."""

    class Runner:
        def __init__(self, args, model_config, rows, context):
            self.server_args, self.model_config, self.device = args, model_config, "cpu"
            self.req_to_token_pool = module("sglang.srt.mem_cache.memory_pool").ReqToTokenPool(rows, context)

        def build(self, size):
            arguments = {
                "page_size": self.server_args.page_size,
                "dtype": torch.bfloat16,
                "head_num": self.model_config.kv_heads,
                "head_dim": self.model_config.head_dim,
                "layer_num": self.model_config.layers,
                "device": "cpu",
                "enable_memory_saver": False,
            }
            if configurator:
                plain = module("sglang.srt.mem_cache.memory_pool").MHATokenToKVPool
                self.arguments = arguments
                self.token_to_kv_pool = self._build_mha_kv_pool(max_total_num_tokens=size, mha_pool_class=plain)
            else:
                self._init_pools(size, arguments)

        def _build_mha_kv_pool(self, *, max_total_num_tokens, mha_pool_class, quant_method=None):
            return mha_pool_class(max_total_num_tokens, **self.arguments)

        def _init_pools(self, size, arguments):
            home = module("sglang.srt.model_executor.model_runner_kv_cache_mixin")
            self.token_to_kv_pool = home.MHATokenToKVPool(size, **arguments)

    return Runner


def module(name: str) -> Any:
    return sys.modules[name]


def install(monkeypatch, version: str) -> SimpleNamespace:
    """Put the modules in place and return what tests hold in their hands."""
    configurator = tuple(map(int, version.split(".")[2:3])) >= (16,)
    backends: dict[str, Any] = {}
    choices = ["triton"]
    runner = make_runner(configurator)

    def register_attention_backend(name):
        return lambda factory: backends.setdefault(name, factory)

    class ServerArgs(SimpleNamespace):
        def check_server_args(self):
            return None

        def get_model_config(self):
            return self.config

    class Scheduler:
        def get_internal_state(self, recv_req):
            return SimpleNamespace(internal_state={})

    def update(self, recv_req):
        return True, "loaded"

    names = ("disk", "tensor", "distributed", "ipc")
    worker = type("BaseTpWorker", (), {f"update_weights_from_{name}": update for name in names})

    def of_runner(mr):
        return "stock"

    def of_configurator(kvc):
        return "stock"

    class MemoryPoolConfigurator:
        pass

    registry = make_registry()
    parts = {
        "layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
        "layers.attention.attention_registry": {"register_attention_backend": register_attention_backend},
        "server_args": {"add_attention_backend_choices": choices.extend, "ServerArgs": ServerArgs},
        "environ": {"envs": SimpleNamespace(SGLANG_USE_HND_KVCACHE=SimpleNamespace(get=lambda: False))},
        "plugins.hook_registry": {"HookRegistry": registry, "HookType": HookType},
        "mem_cache.memory_pool": {
            "KVCache": KVCache,
            "MHATokenToKVPool": PlainPool,
            "ReqToTokenPool": make_request_pool(),
        },
        "managers.schedule_batch": {"Req": make_req()},
        "managers.scheduler": {"Scheduler": Scheduler},
        "managers.tp_worker": {"BaseTpWorker": worker},
        "model_executor.pool_configurator": {
            "create_memory_pool_configurator": of_configurator if configurator else of_runner,
            "MemoryPoolConfigurator": MemoryPoolConfigurator,
            "MemoryPoolConfig": SimpleNamespace,
        },
        "runtime_context": {"get_parallel": lambda: SimpleNamespace(attn_tp_size=1, attn_tp_rank=0)},
    }
    if version.startswith("0.5.13"):
        del parts["runtime_context"]
        parts["layers.dp_attention"] = {"get_attention_tp_size": lambda: 1, "get_attention_tp_rank": lambda: 0}
    if configurator:
        parts["mem_cache.kv_cache_configurator"] = {"KVCacheConfigurator": runner}
    else:
        parts["model_executor.model_runner_kv_cache_mixin"] = {
            "ModelRunnerKVCacheMixin": runner,
            "MHATokenToKVPool": PlainPool,
        }
    for path, members in parts.items():
        names = ["sglang", "srt", *path.split(".")]
        for count in range(1, len(names) + 1):
            name = ".".join(names[:count])
            if not hasattr(sys.modules.get(name), "small"):
                made = types.ModuleType(name)
                made.small, made.__path__ = True, []  # type: ignore[attr-defined]
                monkeypatch.setitem(sys.modules, name, made)
                if count > 1:
                    setattr(sys.modules[".".join(names[: count - 1])], names[count - 1], made)
        vars(sys.modules[".".join(names)]).update(members)
    return SimpleNamespace(
        backends=backends,
        choices=choices,
        registry=registry,
        Runner=runner,
        ServerArgs=ServerArgs,
        Scheduler=Scheduler,
        Worker=worker,
        Req=parts["managers.schedule_batch"]["Req"],
    )
