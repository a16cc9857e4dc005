"""The flags of SGLang that 2-bit pages do not support, each with what is legal and why.

A rule names a field of ``ServerArgs``; releases that lack the field satisfy it. Fields that no rule names were read
in every release of the window and found harmless; the tests hold their list, so that a new one is looked at.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, NoReturn

from kvcq.errors import InputError

PAGE = 64
BACKEND = "kvcq"
# Work lists of the kernels hold this many requests.
MAX_REQUESTS = 4096


@dataclass(frozen=True)
class Rule:
    """One flag and the values of it that are served.

    Args:
        field: Name in ``ServerArgs``.
        legal: Values that are served; the first one also stands for a field that is not there.
        reason: Why every other value is refused.
        kind: How the flag is written: a ``switch``, or with a ``text`` or ``number`` after it.
        aliases: Further spellings of the flag.
    """

    field: str
    legal: tuple[Any, ...]
    reason: str
    kind: Literal["switch", "text", "number"] = "switch"
    aliases: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The flag as SGLang spells it."""
        return "--" + self.field.replace("_", "-")

    @property
    def remedy(self) -> str:
        """What the user can do."""
        named = [str(value) for value in self.legal if value is not None and value is not False]
        if self.kind == "switch" or not named:
            return f"leave {self.flag} out"
        return f"{self.flag} {' or '.join(named)}"


def _off(field: str, reason: str) -> Rule:
    return Rule(field, (False, None), reason)


def _unset(field: str, reason: str, *others: Any) -> Rule:
    return Rule(field, (None, *others), reason, "text")


def _one(field: str, reason: str, *aliases: str) -> Rule:
    return Rule(field, (1, None), reason, "number", aliases)


OTHER_CACHE = "pages of 2-bit codes cannot leave the pool, and their exact rows live beside it"
SPECULATION = "drafts are verified by several queries of one request at once, which the kernels do not read"
SPLIT = "the rows of one request would be split over ranks"
POOL = "it would replace the pool that holds the codes"
# Kinds of graphs of a prefill whose attention still runs eagerly, with the batch of now.
PREFILL_GRAPHS = ("disabled", "breakable")
PREFILL = "a graph of a whole prefill would replay the lengths and copies of the batch that it was captured with"

RULES = (
    Rule("attention_backend", (BACKEND,), "only this backend reads 2-bit pages", "text"),
    _unset("prefill_attention_backend", "prefill and decode read one cache with one backend", BACKEND),
    _unset("decode_attention_backend", "prefill and decode read one cache with one backend", BACKEND),
    Rule("page_size", (PAGE,), "a page is one block of 64 tokens a KV head", "number"),
    Rule("kv_cache_dtype", ("auto", "bf16", "bfloat16"), "the bundle says how rows are coded", "text"),
    Rule("dtype", ("auto", "bfloat16"), "exact rows and queries are bfloat16", "text"),
    Rule("device", (None, "cuda"), "the kernels need an NVIDIA GPU", "text"),
    _unset("speculative_algorithm", SPECULATION),
    Rule("decoupled_spec_role", ("null", None), SPECULATION, "text"),
    _off("enable_multi_layer_eagle", SPECULATION),
    Rule("disaggregation_mode", ("null", None), OTHER_CACHE, "text"),
    _off("disaggregation_decode_enable_offload_kvcache", OTHER_CACHE),
    _off("enable_hierarchical_cache", OTHER_CACHE),
    _unset("hicache_storage_backend", OTHER_CACHE),
    _off("enable_lmcache", OTHER_CACHE),
    _off("enable_flexkv", OTHER_CACHE),
    _off("enable_hisparse", OTHER_CACHE),
    _unset("radix_cache_backend", "another prefix tree may match past the recent window"),
    _off("enable_mixed_chunk", "a batch would mix prefill and decode, which are read by different kernels"),
    _off("enable_unified_memory", POOL),
    _off("enable_page_major_kv_layout", POOL),
    _off("prefill_only_disable_kv_cache", POOL),
    _off("enable_memory_saver", "released memory would lose codes and exact rows that requests still read"),
    _off("enable_pdmux", "prefill and decode would write exact rows from two streams at once"),
    _off("enable_two_batch_overlap", "two halves of a batch would share one plan of work"),
    _one("attn_cp_size", SPLIT, "--attention-context-parallel-size"),
    _one("dcp_size", SPLIT, "--decode-context-parallel-size"),
    _off("enable_prefill_cp", SPLIT),
    _off("enable_prefill_context_parallel", SPLIT),
    _off("enable_dsa_prefill_context_parallel", SPLIT),
    _off("enable_cp_decode_attn_tp", SPLIT),
    _one("pp_size", "layers of one model on several ranks were never run", "--pipeline-parallel-size"),
    _one(
        "dp_size",
        "replicas would answer one proof and write one trace; start a server for each",
        "--data-parallel-size",
    ),
    _off("enable_dp_attention", "ranks that idle or gather the batches of others were never run"),
    _off("enable_streaming_session", "a session keeps its slot without freeing it, so its exact rows would be lost"),
    _off("enable_session_radix_cache", "a session would hold a prefix without its exact rows"),
    _unset("dllm_algorithm", "a diffusion model rewrites tokens that are already coded"),
    _off("enable_mis", "several items of one sequence do not see each other, which the kernels do not mask"),
    Rule("kv_canary", ("none", None), "it reads BF16 rows out of the pool", "text"),
    _off("enable_torch_compile", "kernels are launched from Python, which a compiled model would not run"),
    _unset("cuda_graph_backend_prefill", PREFILL, *PREFILL_GRAPHS),
    _off("enforce_piecewise_cuda_graph", PREFILL),
    _off("enable_deterministic_inference", "results of one request may differ in the last bit between batch sizes"),
    _unset("rl_on_policy_target", "it needs results that do not depend on the batch"),
    _off("enable_lora", "an adapter makes keys and values that the bundle was not fitted on"),
    _unset("lora_paths", "an adapter makes keys and values that the bundle was not fitted on"),
    _off("use_ray", "plugins are not loaded in its workers"),
    _off("grpc_mode", "its server was never proven to load plugins"),
    _off("smg_grpc_mode", "its server was never proven to load plugins"),
    _off("encoder_only", "an encoder has no cache"),
)

# Flags that are checked against the model and the memory, not against a list.
SIZES = (
    Rule("max_running_requests", (), "exact rows are reserved for each request", "number"),
    Rule("tp_size", (), "KV heads are dealt to ranks", "number", ("--tensor-parallel-size",)),
)

# Environment variables of SGLang with the same effect as a flag, and why they must be off.
SWITCHES = {
    "SGLANG_USE_HND_KVCACHE": POOL,
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "it would resize a pool of BF16 rows",
    "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": POOL,
    "SGLANG_RUST_SERVER": "its server was never proven to load plugins",
}
# SGLang loads only the plugins of this list where it is set.
PLUGINS = "SGLANG_PLUGINS"


def environment(envs: Any) -> dict[str, str]:
    """Return the variables above as SGLang itself reads them.

    Args:
        envs: ``sglang.srt.environ.envs``; a release without a variable does not read it either.
    """
    names = [name for name in (*SWITCHES, PLUGINS) if hasattr(envs, name)]
    return {name: "" if (value := getattr(envs, name).get()) is None else str(value) for name in names}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message, where="arguments for SGLang", fix="write the flag out as SGLang does")


def parse(argv: Sequence[str]) -> SimpleNamespace:
    """Return the fields that rules ask for, as a user's arguments to SGLang set them, without importing SGLang.

    This refuses before anything is loaded; the answer of SGLang's own parser is checked again inside the server.
    Fields that the arguments do not set are absent, numbers that are none stay text.

    Raises:
        InputError: an abbreviated flag may mean several flags, or a switch is given a value.
    """
    parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    for rule in (*RULES, *SIZES):
        form: dict[str, Any] = {"action": "store_true"} if rule.kind == "switch" else {"nargs": "*"}
        parser.add_argument(rule.flag, *rule.aliases, dest=rule.field, **form)
    found, _ = parser.parse_known_args(list(argv))
    numbers = {rule.field for rule in (*RULES, *SIZES) if rule.kind == "number"}
    return SimpleNamespace(**{name: _value(value, name in numbers) for name, value in vars(found).items()})


def _value(value: Any, number: bool) -> Any:
    if not isinstance(value, list):
        return value
    text = " ".join(value)
    return int(text) if number and text.isdecimal() else text
