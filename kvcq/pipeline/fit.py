"""fit: statistics and a method to transforms, quantizers and a plan. Needs no model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvcq.artifacts.fit_file import write_fit
from kvcq.artifacts.stats_file import StatsArtifact, read_stats
from kvcq.artifacts.tensors import tensor_index, tensors_digest
from kvcq.codecs.pair import HeadCodec
from kvcq.errors import InputError, UnsupportedError
from kvcq.evaluation.warnings import centring_warnings, rank_warnings, sharing_warnings
from kvcq.methods.base import FitContext, Method
from kvcq.pipeline.eligible import bf16_reason
from kvcq.pipeline.output import exclusive
from kvcq.pipeline.progress import SILENT, Reporter
from kvcq.pipeline.recipes import apply_settings, load_recipe, resolve
from kvcq.pipeline.requests import FitRequest
from kvcq.pipeline.result import aligned
from kvcq.pipeline.versions import versions
from kvcq.spec.codec import VQ_WORDS
from kvcq.spec.geometry import LayerGeometry
from kvcq.spec.header import FitHeader, StatsHeader
from kvcq.spec.plan import LayerPlan
from kvcq.spec.recipe import Recipe
from kvcq.stats.part import layer_stats
from kvcq.stats.target import retarget
from kvcq.stats.view import LayerStats
from kvcq.transforms.spectral import effective_rank

FP16_MAX = 65504.0
GOOD_ROWS = 8 * VQ_WORDS


@dataclass(frozen=True)
class FitResult:
    """What fit wrote: the folder and its header. `path` is None after a dry run."""

    path: Path | None
    header: FitHeader | None
    recipe: Recipe

    def text(self) -> str:
        """Return the result for people."""
        parameters = ", ".join(f"{key}={value}" for key, value in self.recipe.params.items())
        rows = [("fit", str(self.path) if self.path else "dry run, nothing written"), ("method", self.recipe.method)]
        if parameters:
            rows.append(("parameters", parameters))
        rows.append(("windows", f"sink {self.recipe.windows.sink}, recent {self.recipe.windows.recent}"))
        if self.header is not None:
            means = {layer: max(row) for layer, row in notes_of(self.header, "mean_ratio").items()}
            costs = {layer: sum(row) / len(row) for layer, row in notes_of(self.header, "shared_cost").items()}
            kept = sum(1 for entry in self.header.plan if entry.quantized)
            rows += [
                ("layers", f"{kept} of {len(self.header.plan)} quantized"),
                ("context", f"fitted for {self.header.target_context} tokens"),
                ("key mean", _extreme("|mean|^2 / variance", means)),
                (
                    "one rotation a layer",
                    _extreme("multiplies the key error by", costs),
                ),
                ("tensors", self.header.tensors_digest),
            ]
        return "\n".join(aligned([row for row in rows if row[1]]))

    def payload(self) -> dict[str, Any]:
        """Return the result for machines."""
        record: dict[str, Any] = {"path": str(self.path) if self.path else None, "recipe": self.recipe.plain()}
        if self.header is not None:
            record |= {
                "digest": self.header.digest,
                "tensors_digest": self.header.tensors_digest,
                "quantized_layers": [entry.layer for entry in self.header.plan if entry.quantized],
                "mean_ratio": {str(n): max(row) for n, row in notes_of(self.header, "mean_ratio").items()},
                "shared_cost": {str(n): list(row) for n, row in notes_of(self.header, "shared_cost").items()},
                "rank": {str(n): list(row) for n, row in notes_of(self.header, "rank").items()},
                "warnings": list(self.header.warnings),
            }
        return record


def notes_of(header: FitHeader, name: str) -> dict[int, tuple[float, ...]]:
    """Return the notes of one name by layer, in order of layer id."""
    found = {}
    for key, row in header.notes.items():
        _, layer, own = key.split(".", 2)
        if own == name and row:
            found[int(layer)] = row
    return dict(sorted(found.items()))


def _extreme(what: str, values: Mapping[int, float]) -> str:
    """Say where a number is largest, or nothing without numbers."""
    if not values:
        return ""
    worst = max(values, key=lambda layer: values[layer])
    return f"{what} up to {values[worst]:.3g}, in layer {worst}"


@exclusive
def fit(request: FitRequest, reporter: Reporter = SILENT) -> FitResult:
    """Fit a method to statistics and write a fit folder.

    Raises:
        InputError: bad recipe, statistics of a single shard, a layer id to skip that the model does not have, or
            windows that the method cannot work with.
        CorruptArtifactError: the statistics are damaged.
        UnsupportedError: a target context beyond the collected length on a layer without un-rotation.
    """
    recipe, method = resolve(base_fields(request), request.recipe or "--method")
    reporter.stage(f"reading statistics {request.stats.name}")
    stats = read_stats(request.stats)
    refuse_shard(stats.header, request.stats)
    check_recipe(recipe, method, stats.header)
    if request.dry_run:
        return FitResult(None, None, recipe)
    header, tensors = fit_layers(stats, recipe, method, reporter)
    header = write_fit(request.out, header, tensors, force=request.force)
    return FitResult(request.out, header, recipe)


class Asked(Protocol):
    """A request that describes a recipe."""

    @property
    def method(self) -> str | None:
        """Method name; overrides the recipe's."""

    @property
    def recipe(self) -> Path | None:
        """YAML recipe file."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Pairs of ``key=value``."""

    @property
    def target_context(self) -> int | None:
        """Overrides the recipe's."""


def base_fields(request: Asked) -> dict[str, Any]:
    """Return the recipe that a request describes, as fields that `recipes.resolve` takes.

    Raises:
        InputError: an unreadable recipe or a setting that is none.
    """
    fields: dict[str, Any] = load_recipe(request.recipe) if request.recipe else {}
    if request.method is not None:
        if request.method != fields.get("method"):
            fields = {**fields, "params": {}}
        fields = {**fields, "method": request.method}
    fields = apply_settings(fields, request.settings)
    if request.target_context is not None:
        fields["target_context"] = request.target_context
    return fields


def check_recipe(recipe: Recipe, method: Method, header: StatsHeader) -> None:
    """Refuse a recipe that cannot be fitted to these statistics, before any work.

    Raises:
        InputError: a layer that the model does not have or the method cannot code, a target context or windows out of
            range.
    """
    check_layers(recipe, header)
    method.check_windows(recipe.windows)
    for layer in header.geometry.quantizable():
        if bf16_plan(layer, header, recipe, method) is None:
            method.check(layer)


def refuse_shard(header: StatsHeader, where: Path) -> None:
    """Refuse a part of a collection: it would be fitted as readily as the whole, and nobody would notice.

    Raises:
        InputError: names the shard and the verb that completes it.
    """
    if header.shard is not None:
        raise InputError(
            f"shard {header.shard} of a collection is not the whole of it",
            where=where,
            fix="run kvcq merge on all its shards and fit the result",
        )


def check_layers(recipe: Recipe, header: StatsHeader) -> None:
    """Refuse layer ids that the model does not have and a target context inside the sink."""
    known = {layer.layer for layer in header.geometry.layers}
    unknown = sorted(set(recipe.skip_layers) - known)
    if unknown:
        raise InputError(f"the model has no layer {unknown[0]}", where="skip_layers", fix=f"layers are 0..{max(known)}")
    longest = header.geometry.max_positions
    if recipe.target_context is not None and longest is not None and recipe.target_context > longest:
        raise InputError(
            f"target context {recipe.target_context} is beyond the model's {longest} positions",
            where="--target-context",
            fix=f"give at most {longest}",
        )
    if recipe.target_context is not None and recipe.target_context <= recipe.windows.sink:
        raise InputError(
            f"target context {recipe.target_context} lies inside the {recipe.windows.sink} sink tokens",
            where="--target-context",
            fix="give the context length that will be served",
        )


def fit_layers(
    stats: StatsArtifact, recipe: Recipe, method: Method, reporter: Reporter, context: FitContext | None = None
) -> tuple[FitHeader, dict[str, np.ndarray]]:
    """Fit every quantizable layer; return the header (without files) and the served tensors.

    `context` replaces the one that is made of the recipe's seed and windows.
    """
    header = stats.header
    context = context or FitContext(seed=recipe.seed, windows=recipe.windows)
    layers = header.geometry.quantizable()
    plans = {layer.layer: bf16_plan(layer, header, recipe, method) for layer in header.geometry.layers}
    tensors: dict[str, np.ndarray] = {}
    notes: dict[str, tuple[float, ...]] = {}
    ratios: dict[int, float] = {}
    ranks: dict[int, tuple[float, ...]] = {}
    samples = stats.samples
    reporter.stage(f"fitting {method.name}")
    for done, layer in enumerate(layers, start=1):
        if plans[layer.layer] is None:
            view = targeted(layer_stats(header, stats.moments, samples, layer.layer), header, recipe)
            ratios[layer.layer] = float(view.mean_ratio.max())
            ranks[layer.layer] = view_ranks(view)
            result = method.fit_layer(view, context)
            fitted = LayerPlan(layer=layer.layer, k=result.k, v=result.v)
            check_range(fitted, view, result.tensors)
            plans[layer.layer] = fitted
            tensors |= {f"layers.{layer.layer}.{role}": array for role, array in result.tensors.items()}
            notes |= {f"layers.{layer.layer}.{name}": value for name, value in result.notes.items()}
        reporter.advance(done, len(layers), "layers")
    plan = tuple(entry for layer in header.geometry.layers if (entry := plans[layer.layer]) is not None)
    warnings = [*centring_warnings(plan, ratios), *rank_warnings(ranks)]
    if method_shares(recipe):
        names = {layer: f"layers.{layer}.shared_cost" for layer in ratios}
        costs = {layer: notes[name] for layer, name in names.items() if name in notes}
        warnings += sharing_warnings(costs)
    warnings += position_warnings(header, recipe)
    warnings += codebook_warnings(notes)
    for warning in warnings:
        reporter.warn(warning)
    index = tensor_index(tensors)
    notes |= {f"layers.{layer}.mean_ratio": (ratio,) for layer, ratio in ratios.items()}
    notes |= {f"layers.{layer}.rank": rank for layer, rank in ranks.items()}
    return (
        FitHeader(
            recipe=recipe,
            stats_digest=stats.digest,
            identity=header.identity,
            provenance=header.provenance,
            geometry=header.geometry,
            calibration=header.data,
            collected_context=header.longest,
            target_context=recipe.target_context or header.longest,
            plan=plan,
            tensors=index,
            tensors_digest=tensors_digest(index, tensors),
            notes=notes,
            warnings=tuple(warnings),
            versions=versions(),
        ),
        tensors,
    )


def view_ranks(view: LayerStats) -> tuple[float, ...]:
    """Return d_k and the smallest rank over the KV heads of key covariance, query moment and value covariance.

    Values count relative to their own dimension, so that one number is the full rank of all three.
    """
    d_k, d_v = view.geometry.d_k, view.geometry.d_v
    keys, queries, values = (
        float(effective_rank(matrix).min()) for matrix in (view.k_cov, view.moments["q_second"], view.v_cov)
    )
    return float(d_k), keys, queries, values * d_k / d_v


def method_shares(recipe: Recipe) -> bool:
    """Say whether the fit has one rotation for all KV heads of a layer."""
    return recipe.params.get("granularity") == "layer"


def bf16_plan(layer: LayerGeometry, header: StatsHeader, recipe: Recipe, method: Method) -> LayerPlan | None:
    """Return the plan of a layer that stays BF16, or None for a layer that is quantized."""
    if layer.kind != "full":
        reason = header.skipped.get(str(layer.layer), f"{layer.kind} attention layer")
    elif not method.quantizes:
        reason = f"method {method.name}"
    elif layer.layer in recipe.skip_layers:
        reason = "skipped by the recipe"
    else:
        unfit = bf16_reason(layer)
        if unfit is None:
            return None
        reason = unfit
    return LayerPlan(layer=layer.layer, reason=reason)


def check_range(entry: LayerPlan, view: LayerStats, tensors: Mapping[str, np.ndarray]) -> None:
    """Refuse a layer whose sampled rows do not fit the fp16 scales in the frame they are coded in.

    Raises:
        UnsupportedError: a coordinate beyond 65504; names the layer and how to keep it in BF16.
    """
    codec = HeadCodec.build(entry, view.geometry, tensors)
    for side, rows in (("keys", codec.key_frame(view.k_rows)), ("values", codec.value_frame(view.v_rows))):
        largest = float(rows.abs().amax()) if rows.numel() else 0.0
        if largest > FP16_MAX:
            raise UnsupportedError(
                f"{side} reach {largest:.3g} in the frame they are coded in, beyond fp16",
                where=f"layer {entry.layer}",
                fix=f"keep the layer in BF16: --set skip_layers={entry.layer}",
            )


def targeted(view: LayerStats, header: StatsHeader, recipe: Recipe) -> LayerStats:
    """Average the statistics of one layer over the target context, when there is one."""
    if recipe.target_context is None:
        return view
    # One seed for all layers: they share the rows, so they share the positions these are moved to.
    return retarget(view, recipe.target_context, recipe.windows.sink, recipe.seed, collected=header.longest)


def position_warnings(header: StatsHeader, recipe: Recipe) -> list[str]:
    """Warn when position-bound statistics are stretched far beyond the collected length."""
    target = recipe.target_context
    if target is None or target <= 2 * header.longest:
        return []
    return [
        f"target context {target} exceeds twice the collected length {header.longest}: the attention-output "
        "moment and the sink mass are those of the shorter context; collect longer sequences to be sure"
    ]


def codebook_warnings(notes: Mapping[str, tuple[float, ...]]) -> list[str]:
    """Warn of codebooks learned from few rows: poor words, and words that repeat calibration rows."""
    rows = min((values[0] for key, values in notes.items() if key.endswith(".codebook_rows")), default=math.inf)
    if rows >= GOOD_ROWS:
        return []
    return [
        f"{rows:.0f} sampled rows stand behind {VQ_WORDS} words a codebook: collect more tokens and --rows of at least "
        f"{GOOD_ROWS}; words may also repeat calibration rows, so treat this fit as private as the text"
    ]
