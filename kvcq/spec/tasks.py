"""Model-level results of validate: what the served path does to perplexity, retrieval and generation.

Scores belong to one artifact, settings and paired tests to the whole report. `context` is always the length of the
cache in tokens; shares are between 0 and 1; divergences and losses are in nats.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvcq.spec.base import SpecModel
from kvcq.spec.files import Sha256

CacheMode = Literal["packed", "simulate"]


class Interval(SpecModel):
    """A 95 % percentile bootstrap interval."""

    low: float
    high: float


class PerplexityScore(SpecModel):
    """Teacher-forced perplexity of one artifact at one context.

    Attributes:
        context: Tokens of each passage.
        passages: Passages read.
        tokens: Tokens scored, all passages together.
        nll: Summed negative log-likelihood of them, nats.
        perplexity: exp(nll / tokens).
        interval: Of the perplexity, blocks of scored tokens resampled.
        ratio: Perplexity over that of the BF16 reference.
        ratio_interval: Of the ratio, the same blocks resampled on both sides.
        block_nll: Loss of each block of about 64 consecutive scored tokens, nats, for other resamplings.
        block_tokens: Tokens of each block.
    """

    context: int = Field(ge=1)
    passages: int = Field(ge=1)
    tokens: int = Field(ge=1)
    nll: float
    perplexity: float
    interval: Interval
    ratio: float
    ratio_interval: Interval
    block_nll: tuple[float, ...]
    block_tokens: tuple[int, ...]


class NeedleCell(SpecModel):
    """One cell of the heat map: a subtask at one context and depth.

    `depth` is where the first needle stands, percent of the haystack; `score` the mean share of needles found,
    `exact` the share of items in which all were.
    """

    context: int = Field(ge=1)
    depth: float = Field(ge=0, le=100)
    task: str
    items: int = Field(ge=1)
    score: float
    exact: float


class NeedleLength(SpecModel):
    """All subtasks and depths at one context; `interval` is of the score, items resampled."""

    context: int = Field(ge=1)
    items: int = Field(ge=1)
    score: float
    interval: Interval
    exact: float


class NeedleItem(SpecModel):
    """One question: needles found of those asked for, prompt and answer tokens, and whether the limit cut the answer.

    `row` is the item's number within its subtask and context; with the seed it names the prompt.
    """

    context: int = Field(ge=1)
    depth: float = Field(ge=0, le=100)
    task: str
    row: int = Field(ge=0)
    found: int = Field(ge=0)
    asked: int = Field(ge=1)
    prompt_tokens: int = Field(ge=1)
    new_tokens: int = Field(ge=0)
    truncated: bool


class NeedleScore(SpecModel):
    """Retrieval of one artifact; `items` are in the same order in every row of the report.

    `errors` counts items that failed to run: such a run is aborted, so a written report holds 0.
    """

    score: float
    interval: Interval
    exact: float
    truncated: int = Field(ge=0)
    errors: int = Field(ge=0)
    lengths: tuple[NeedleLength, ...]
    cells: tuple[NeedleCell, ...]
    items: tuple[NeedleItem, ...]


class AgreementScore(SpecModel):
    """Greedy continuation against the BF16 reference after prompts of one context.

    Attributes:
        context: Tokens of each prompt.
        prompts: Prompts continued.
        tokens: Reference tokens compared, all prompts together.
        first_divergence: Of each prompt, index of the first generated token that differs; None: none did.
        near_ties: First divergences where the reference itself is undecided (see `AgreementSettings`).
        agreement: float of steps whose likeliest token is the reference's, its own tokens fed.
        interval: Of the agreement, blocks of up to 8 consecutive steps resampled.
        kl: Mean KL(P_ref || P) along the reference's tokens.
        kl_max: The largest of a step.
    """

    context: int = Field(ge=1)
    prompts: int = Field(ge=1)
    tokens: int = Field(ge=1)
    first_divergence: tuple[int | None, ...]
    near_ties: int = Field(ge=0)
    agreement: float
    interval: Interval
    kl: float
    kl_max: float


class DecodeKLScore(SpecModel):
    """Next-token distributions of single-token steps after one context, the reference's own greedy tokens fed.

    Attributes:
        context: Tokens in the cache before the first step.
        passages: Passages read.
        steps: Steps measured, all passages together.
        kl: Mean KL(P_ref || P) over the full vocabulary.
        interval: Of the mean, blocks of up to 8 consecutive steps resampled.
        kl_median, kl_p90, kl_max: Quantiles of the KL over steps.
        top1: float of steps with the reference's likeliest token.
        nll: Mean negative log-likelihood of the tokens.
        nll_reference: The same under the BF16 reference.
    """

    context: int = Field(ge=1)
    passages: int = Field(ge=1)
    steps: int = Field(ge=1)
    kl: float
    interval: Interval
    kl_median: float
    kl_p90: float
    kl_max: float
    top1: float
    nll: float
    nll_reference: float


class TaskScores(SpecModel):
    """What the model-level tasks found for one artifact, read through a `cache` that is packed or simulated."""

    cache: CacheMode
    perplexity: tuple[PerplexityScore, ...] = ()
    needle: NeedleScore | None = None
    agreement: tuple[AgreementScore, ...] = ()
    decode_kl: tuple[DecodeKLScore, ...] = ()


class PerplexitySettings(SpecModel):
    """Passages do not overlap: each is read once from its start, `chunk` tokens a forward.

    Tokens from `score_from` (a share of the context) to the end are scored; `stride` is the distance of two starts.
    """

    contexts: tuple[int, ...]
    passages: int = Field(ge=1)
    chunk: int = Field(ge=1)
    stride: int = Field(ge=1)
    score_from: float


class NeedleSettings(SpecModel):
    """How the questions were made; an item is a function of (seed, task, row, context, haystack, tokenizer).

    `template` is False when the tokenizer has no chat template: the prompt is then the bare text.
    """

    tasks: tuple[str, ...]
    contexts: tuple[int, ...]
    depths: tuple[float, ...]
    items: int = Field(ge=1)
    haystack: str
    haystack_sha256: Sha256
    template: bool
    chunk: int = Field(ge=1)
    new_tokens: dict[str, int]


class AgreementSettings(SpecModel):
    """A first divergence is a near-tie where the reference's two likeliest tokens are within `near_tie` nats.

    Generation is greedy and goes on past the end-of-text token.
    """

    contexts: tuple[int, ...]
    prompts: int = Field(ge=1)
    new_tokens: int = Field(ge=1)
    chunk: int = Field(ge=1)
    near_tie: float


class DecodeKLSettings(SpecModel):
    """Each passage gives `steps` single-token steps after its context, which is read `chunk` tokens a forward."""

    contexts: tuple[int, ...]
    passages: int = Field(ge=1)
    steps: int = Field(ge=1)
    chunk: int = Field(ge=1)


class TaskSettings(SpecModel):
    """Everything that the tasks' numbers depend on besides model, artifacts and text."""

    seed: int
    resamples: int = Field(ge=1)
    perplexity: PerplexitySettings | None = None
    needle: NeedleSettings | None = None
    agreement: AgreementSettings | None = None
    decode_kl: DecodeKLSettings | None = None


class PairTest(SpecModel):
    """Exact two-sided McNemar test of two artifacts on the same items, each right or wrong; not corrected for many.

    Attributes:
        task: Task of the items, e.g. ``needle``.
        first, second: Names of the artifacts.
        items: Items that both answered.
        only_first, only_second: Items that one of them alone got right.
        difference: float right of the first minus that of the second.
        standard_error: sqrt(only_first + only_second) / items.
        p_value: Of equal shares.
    """

    task: str
    first: str
    second: str
    items: int = Field(ge=1)
    only_first: int = Field(ge=0)
    only_second: int = Field(ge=0)
    difference: float
    standard_error: float
    p_value: float
