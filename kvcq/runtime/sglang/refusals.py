"""What the plugin refuses, each with the flag, the reason and what is legal.

`refusals` is a pure function: ``kvcq serve`` asks before it launches anything, the plugin asks again inside the server,
after SGLang's own checks, when every flag has its final value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcq.errors import UnsupportedError, shown
from kvcq.runtime.sglang.facts import TRAITS, ModelFacts
from kvcq.runtime.sglang.flags import (
    BACKEND,
    MAX_REQUESTS,
    PLUGINS,
    PREFILL,
    PREFILL_GRAPHS,
    RULES,
    SWITCHES,
)
from kvcq.runtime.sglang.frequencies import differs
from kvcq.runtime.sglang.ranks import FLAG, legal_ranks
from kvcq.runtime.sglang.versions import INSTEAD
from kvcq.spec.geometry import LayerGeometry, ModelGeometry
from kvcq.spec.identity import Identity
from kvcq.spec.plan import LayerPlan

OFF = ("", "0", "false", "no", "n")
FIELDS = ("q_heads", "kv_heads", "d_k", "d_v")
REQUESTS = "--max-running-requests"


@dataclass(frozen=True)
class Refusal:
    """One thing that is not served.

    Args:
        flag: The flag, environment variable or part of the model at fault.
        reason: Why, without a final full stop.
        remedy: What is legal.
    """

    flag: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.flag}: {self.reason}; {self.remedy}"


def refusals(
    args: Any,
    model: ModelFacts | None,
    *,
    geometry: ModelGeometry | None = None,
    identity: Identity | None = None,
    plan: Sequence[LayerPlan] = (),
    environment: Mapping[str, str] | None = None,
) -> tuple[Refusal, ...]:
    """Return everything that 2-bit pages do not serve, in a fixed order.

    Args:
        args: Fields of SGLang's ``ServerArgs``; those that it lacks count as left out.
        model: The model that will be loaded, with its overrides; None where it has not been read yet: what rests on
            it waits.
        geometry: The model that the bundle was fitted on; None leaves the comparison out.
        identity: Of that model; None leaves flags of norms and biases out.
        plan: The bundle's layers; empty leaves them out.
        environment: Variables of the process; None leaves them out.
    """
    found = [*_flags(args), *_graphs(args), *_requests(args)]
    if model is not None:
        found += [*of_model(args, model), *_ranks(args, model)]
    elif geometry is not None and geometry.quantizable():
        found += _ranks(args, geometry.quantizable()[0])
    found += _uncoded(plan)
    if geometry is not None:
        found += _lengths(geometry)
    if model is not None and geometry is not None:
        found += _shape(model, geometry)
        found += _rotary(model, geometry)
    if model is not None and identity is not None:
        found += _flagged(model, identity)
    if environment is not None:
        found += _environment(environment)
    return tuple(found)


def of_model(args: Any, model: ModelFacts) -> tuple[Refusal, ...]:
    """Return what is not served whatever the bundle and the other flags: the model's dtype, class and traits."""
    return *_dtype(args, model), *_model(model)


def refuse(found: Sequence[Refusal]) -> None:
    """Raise where something is refused; the line holds the first, and how many more there are.

    Raises:
        UnsupportedError: `found` is not empty.
    """
    if found:
        first, more = found[0], f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise UnsupportedError(f"{first.reason}{more}", where=first.flag, fix=f"{first.remedy}, {INSTEAD}")


def _flags(args: Any) -> Iterator[Refusal]:
    for rule in RULES:
        value = getattr(args, rule.field, rule.legal[0])
        # bool is an int in Python: a switch of True must not pass as the number 1.
        if not any(value is legal or (type(value) is type(legal) and value == legal) for legal in rule.legal):
            given = rule.flag if value is True else f"{rule.flag} {shown(value)}"
            yield Refusal(given, rule.reason, rule.remedy)


def _graphs(args: Any) -> Iterator[Refusal]:
    """Look at the kind of prefill graphs that SGLang has chosen in the end, whatever flag or default chose it."""
    kind = getattr(getattr(getattr(args, "cuda_graph_config", None), "prefill", None), "backend", None)
    remedy = f"--cuda-graph-backend-prefill {' or '.join(PREFILL_GRAPHS)}"
    if kind is None and getattr(args, "disable_piecewise_cuda_graph", None) is False:
        # Of 0.5.13, which has two switches in place of kinds.
        kind = "breakable" if getattr(args, "enable_breakable_cuda_graph", False) else "piecewise"
        remedy = "--disable-piecewise-cuda-graph"
    named = getattr(args, "cuda_graph_backend_prefill", None) == kind
    if kind is not None and kind not in PREFILL_GRAPHS and not named:
        yield Refusal(f"CUDA graphs of prefills, kind {kind}", PREFILL, remedy)


def _requests(args: Any) -> Iterator[Refusal]:
    count = getattr(args, "max_running_requests", None)
    if not isinstance(count, int) or not 1 <= count <= MAX_REQUESTS:
        reason = "exact rows are reserved for each running request, so their number must be set"
        yield Refusal(f"{REQUESTS} {shown(count)}", reason, f"{REQUESTS} 1 to {MAX_REQUESTS}")


def _dtype(args: Any, model: ModelFacts) -> Iterator[Refusal]:
    if getattr(args, "dtype", "auto") == "auto" and model.dtype != "bfloat16":
        reason = f"exact rows and queries are bfloat16, and this checkpoint runs in {model.dtype}"
        yield Refusal("--dtype auto", reason, "--dtype bfloat16")


def _model(model: ModelFacts) -> Iterator[Refusal]:
    if not model.named:
        remedy = """--json-model-override-args '{"architectures": ["..."]}' with the name of its class"""
        yield Refusal(f"{model.name} config.json", "it names no architecture, by which SGLang picks its code", remedy)
    for trait, reason in TRAITS.items():
        if trait in model.traits:
            yield Refusal(model.name, reason, "serve a model of full-attention layers that are alike")


def _ranks(args: Any, of: ModelFacts | LayerGeometry) -> Iterator[Refusal]:
    ranks, legal = getattr(args, "tp_size", 1), legal_ranks(of.q_heads, of.kv_heads)
    if ranks not in legal:
        reason = f"{of.q_heads} query heads and {of.kv_heads} KV heads cannot be shared by so many ranks"
        yield Refusal(f"{FLAG} {shown(ranks)}", reason, f"{FLAG} {' or '.join(map(str, legal))}")


def _uncoded(plan: Sequence[LayerPlan]) -> Iterator[Refusal]:
    plain = [entry.layer for entry in plan if not entry.quantized]
    if plain:
        layers = ", ".join(map(str, plain[:8])) + (", ..." if len(plain) > 8 else "")
        yield Refusal(f"layers {layers}", "the bundle leaves them BF16, and a pool has one layout", "fit every layer")


def _lengths(geometry: ModelGeometry) -> Iterator[Refusal]:
    if lengths := geometry.length_regimes():
        reason = f"the length of the sequence selects its frequencies ({', '.join(lengths)}), which pages do not follow"
        yield Refusal("RoPE", reason, "serve a model of one RoPE regime")


def _shape(model: ModelFacts, geometry: ModelGeometry) -> Iterator[Refusal]:
    remedy = "collect and fit for this model"
    if len(geometry.layers) != model.layers:
        reason = f"the bundle was fitted on {len(geometry.layers)} layers, the model has {model.layers}"
        yield Refusal(model.name, reason, remedy)
        return
    if model.vocabulary not in (None, geometry.vocab_size):
        reason = f"the bundle was fitted with a vocabulary of {geometry.vocab_size}, the model has {model.vocabulary}"
        yield Refusal(model.name, reason, remedy)
    for layer in geometry.layers:
        if layer.kind != "full":
            yield Refusal(f"layer {layer.layer}", f"the bundle holds it as {layer.kind} attention", remedy)
            return
        for name in FIELDS:
            ours, theirs = getattr(layer, name), getattr(model, name)
            if ours != theirs:
                reason = f"{name} is {ours} in the bundle, {theirs} in the model"
                yield Refusal(f"layer {layer.layer}", reason, remedy)
                return


def _flagged(model: ModelFacts, identity: Identity) -> Iterator[Refusal]:
    """Compare the flags that both sides state: a library may add some with their defaults."""
    for name, ours in {**identity.norms, **identity.biases}.items():
        theirs = model.flags.get(name, ours)
        if theirs != ours:
            reason = f"the bundle was fitted with {name} {shown(ours)}, the model has {shown(theirs)}"
            yield Refusal(f"{model.name} {name}", reason, "collect and fit for this model")


def _rotary(model: ModelFacts, geometry: ModelGeometry) -> Iterator[Refusal]:
    """Compare kinds of RoPE, and frequencies where the configuration alone gives them: base, factor, length."""
    remedy = "leave RoPE overrides out, or collect and fit with them"
    if geometry.length_regimes():
        return
    kind = str(model.rope.get("rope_type", "none"))
    regimes = sorted({rope.regime for rope in geometry.ropes}) or ["none"]
    if regimes != [kind]:
        reason = f"the bundle was fitted with {', '.join(regimes)} positions, the model has {kind}"
        yield Refusal(f"{model.name} RoPE", reason, remedy)
        return
    for layer in geometry.layers:
        rope = geometry.rope_of(layer)
        if rope is not None and differs(rope, model.rope, layer.d_k):
            settings = ", ".join(f"{name} {shown(value)}" for name, value in model.rope.items() if name != "rope_type")
            reason = f"the bundle was fitted with other frequencies than those of {settings}"
            yield Refusal(f"layer {layer.layer} RoPE", reason, remedy)
            return


def _environment(environment: Mapping[str, str]) -> Iterator[Refusal]:
    for name, reason in SWITCHES.items():
        if environment.get(name, "").lower() not in OFF:
            yield Refusal(name, reason, f"unset {name}")
    allowed = [entry.strip() for entry in environment.get(PLUGINS, "").split(",") if entry.strip()]
    if allowed and BACKEND not in allowed:
        yield Refusal(PLUGINS, "SGLang would not load the plugin", f"add {BACKEND} to {PLUGINS}")
