"""Running the model for validate: attention samples, canary logits and fold decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from kvcq.codecs.pair import HeadCodec
from kvcq.codecs.windows import oldest_served
from kvcq.data.sequences import TokenSequence
from kvcq.errors import InputError
from kvcq.evaluation.attention import AttentionBlock, measure_layer, query_positions
from kvcq.evaluation.canary import CanaryRecord, build_canary, canary_length
from kvcq.evaluation.pool import LayerSample
from kvcq.evaluation.simulate import simulated_attention
from kvcq.models.attention import AttentionCall, attention_hook, plain_attention
from kvcq.models.folding import FOLDS, fold_errors
from kvcq.models.library import forward
from kvcq.models.load import LoadedModel
from kvcq.pipeline.requests import ValidateRequest
from kvcq.pipeline.subjects import Subject
from kvcq.spec.boundary import Boundary, served_boundaries
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.plan import Windows
from kvcq.spec.report import FoldDecision

FOLD_TOKENS = 32

Codecs = dict[int, HeadCodec]
Samples = list[list[LayerSample]]
Cuts = Callable[[int], tuple[Boundary, ...]]


def cuts_of(request: ValidateRequest) -> Cuts | None:
    """Return where a request's prefills are cut, or None unless their chunks decide what is exact."""
    if request.semantics != "served":
        return None
    return lambda n: served_boundaries(n, request.chunk, request.cached_at)


def measure_passage(
    loaded: LoadedModel,
    geometry: ModelGeometry,
    sequence: TokenSequence,
    contexts: Sequence[int],
    subjects: Sequence[tuple[Codecs, Windows]],
    queries: int,
    progress: Callable[[int], None],
    cuts: Cuts | None = None,
) -> Samples:
    """Run one held-out sequence and measure every full layer of every subject at every context.

    The layers see exact inputs: errors do not propagate. A layer that a subject keeps in BF16 is measured as such.

    Args:
        loaded: The model.
        geometry: As observed.
        sequence: At least max(contexts) tokens; contexts are its prefixes.
        contexts: Context lengths.
        subjects: Codecs by layer, and windows, of each subject.
        queries: Query positions per context.
        progress: Told how many layers are finished.
        cuts: Boundaries of a served prefill by its length; None: exactness by the window rule.

    Returns:
        One list of samples per subject, over layers and contexts.
    """
    layers = {layer.layer: layer for layer in geometry.quantizable()}
    samples: Samples = [[] for _ in subjects]

    def attend(call: AttentionCall) -> Tensor:
        output = plain_attention(call)
        layer = layers.get(call.layer)
        if layer is not None:
            q, k, v = call.query[0], call.key[0], call.value[0]
            for context in contexts:
                positions = query_positions(context, queries)
                block = AttentionBlock(
                    geometry=layer,
                    q=q[:, positions],
                    q_positions=positions,
                    k=k[:, :context],
                    v=v[:, :context],
                    scaling=call.scaling,
                    softcap=call.softcap,
                    sinks=call.sinks,
                )
                second = query_second(q[:, :context], layer.kv_heads)
                for kept, (codecs, windows) in zip(samples, subjects, strict=True):
                    oldest = None if cuts is None else oldest_served(context, cuts(context), windows)[positions]
                    kept.append(measure_layer(block, codecs.get(call.layer), windows, second, oldest))
            progress(len(samples[0]) // len(contexts))
        return output

    tokens = torch.from_numpy(sequence.tokens[: max(contexts)].astype("int64")).unsqueeze(0)
    with attention_hook(loaded.model, attend):
        forward(loaded.model, tokens, last_only=True)
    return samples


def query_second(q: Tensor, kv_heads: int) -> Tensor:
    """Return the second moment of queries [Hq, T, d] over each KV head's group, [H, d, d] float64."""
    rows = q.double().reshape(kv_heads, -1, q.shape[-1])
    return torch.bmm(rows.mT, rows) / rows.shape[1]


def record_canary(
    loaded: LoadedModel, subject: Subject, codecs: Codecs, exact_cache: dict[bytes, Tensor]
) -> CanaryRecord:
    """Record the canary of one subject; exact logits are shared between subjects of equal windows.

    Args:
        loaded: The model.
        subject: The artifact.
        codecs: Its codecs.
        exact_cache: Logits of the untouched model by token bytes, filled on first use.
    """

    def logits(tokens: Tensor, positions: Tensor, exact: Tensor | None) -> Tensor:
        if exact is not None:
            with attention_hook(loaded.model, simulated_hook(codecs, exact)):
                return _logits(loaded, tokens)[positions]
        key = tokens.numpy().tobytes() + positions.numpy().tobytes()
        if key not in exact_cache:
            exact_cache[key] = _logits(loaded, tokens)[positions]
        return exact_cache[key]

    tokenizer: Any = loaded.tokenizer  # present: see check_canary

    def encode(text: str) -> list[int]:
        # verbose=False: the passages are cut to length afterwards, the library's length warning would be noise.
        return list(tokenizer(text, verbose=False)["input_ids"])

    return build_canary(logits, encode, subject.windows)


def check_canary(loaded: LoadedModel, subject: Subject) -> None:
    """Refuse what would fail only after the measurement: no tokenizer, or windows too large for the model's context.

    Raises:
        InputError: either of them.
    """
    if loaded.tokenizer is None:
        raise InputError("the model has no tokenizer", where=loaded.provenance.source, fix="add its tokenizer files")
    longest, needed = loaded.geometry.max_positions, canary_length(subject.windows)
    if longest is not None and needed > longest:
        raise InputError(
            f"the canary of {subject.name} takes {needed} tokens, the model's context is {longest}",
            where=f"windows sink {subject.windows.sink}, recent {subject.windows.recent}",
            fix="fit with smaller windows, or validate with --no-canary",
        )


def simulated_hook(codecs: Codecs, exact: Tensor) -> Callable[[AttentionCall], Tensor]:
    """Return a hook under which quantized layers read exact and decoded rows as `exact` [T, T] says."""

    def attend(call: AttentionCall) -> Tensor:
        codec = codecs.get(call.layer)
        if codec is None:
            return plain_attention(call)
        output = simulated_attention(
            call.query[0],
            call.key[0],
            call.value[0],
            codec,
            exact,
            call.visible()[0, 0],
            scaling=call.scaling,
            softcap=call.softcap,
            sinks=call.sinks,
        )
        return output.unsqueeze(0)

    return attend


def decide_folds(loaded: LoadedModel, layers: Sequence[int], tokens: Tensor) -> tuple[FoldDecision, ...]:
    """Test on a short forward, layer by layer, whether a value rotation may be folded into W_O."""
    if not layers:
        return ()
    found = fold_errors(loaded.model, tokens[:FOLD_TOKENS], list(layers), seed=0)
    return tuple(
        FoldDecision(
            layer=layer, fold=reason == FOLDS, error=error if error is None or isfinite(error) else None, reason=reason
        )
        for layer, (error, reason) in sorted(found.items())
    )


def _logits(loaded: LoadedModel, tokens: Tensor) -> Tensor:
    """Return the logits [T, vocab] of one sequence."""
    return forward(loaded.model, tokens.unsqueeze(0))[0].float()
