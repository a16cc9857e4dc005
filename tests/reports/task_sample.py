"""The sample report with model-level tasks, many methods side by side, and a sweep."""

from __future__ import annotations

import functools
import math
import random
from itertools import combinations

from kvcq.spec.plan import Windows
from kvcq.spec.recipe import Recipe
from kvcq.spec.report import ArtifactReport, Report
from kvcq.spec.sweep import Sweep, SweepAxis, SweepPoint
from kvcq.spec.tasks import (
    AgreementScore,
    AgreementSettings,
    DecodeKLScore,
    DecodeKLSettings,
    Interval,
    NeedleCell,
    NeedleItem,
    NeedleLength,
    NeedleScore,
    NeedleSettings,
    PairTest,
    PerplexityScore,
    PerplexitySettings,
    TaskScores,
    TaskSettings,
)
from tests.reports.sample import METHODS, artifact, reference, sample_report

LENGTHS = (2048, 4096, 8192)
DEPTHS = (0.0, 25.0, 50.0, 75.0, 100.0)
SUBTASKS = ("single_1", "single_2", "multikey_1", "multikey_2", "multivalue", "multiquery")
# More rows than a chart has colours.
MANY = {f"method-{n:02d}": 0.01 * 1.35**n for n in range(20)}


def around(value: float, part: float = 0.06) -> Interval:
    return Interval(low=value * (1 - part), high=value * (1 + part))


def perplexity(context: int, kl: float) -> PerplexityScore:
    ratio = math.exp(min(5.0, 9 * kl**1.5))
    value = 14.2 * (2048 / context) ** 0.1 * ratio
    return PerplexityScore(
        context=context, passages=4, tokens=2 * context, nll=2 * context * math.log(value), perplexity=value,
        interval=around(value), ratio=ratio, ratio_interval=around(ratio, 0.01), block_nll=(900.5,),
        block_tokens=(512,),
    )  # fmt: skip


def needle(kl: float, seed: int) -> NeedleScore:
    rng = random.Random(seed)
    cells, items = [], []
    for context in LENGTHS:
        for row, (task, depth) in enumerate((t, d) for t in SUBTASKS for d in DEPTHS):
            asked = 4 if task.startswith("multi") and task[5] in "vq" else 1
            lost = min(
                0.97, 7 * kl * (context / 4096) * (1.4 if task != "single_1" else 0.4) * (1 - abs(depth - 50) / 90)
            )
            found = sum(rng.random() >= lost for _ in range(asked))
            cells.append(NeedleCell(context=context, depth=depth, task=task, items=1, score=found / asked,
                                    exact=float(found == asked)))  # fmt: skip
            items.append(NeedleItem(context=context, depth=depth, task=task, row=row, found=found, asked=asked,
                                    prompt_tokens=context - 40, new_tokens=24,
                                    truncated=rng.random() < 0.02))  # fmt: skip
    lengths = []
    for context in LENGTHS:
        own = [cell for cell in cells if cell.context == context]
        score = sum(cell.score for cell in own) / len(own)
        exact = sum(cell.exact for cell in own) / len(own)
        spread = Interval(low=max(0.0, score - 0.11), high=min(1.0, score + 0.11))
        lengths.append(NeedleLength(context=context, items=len(own), score=score, interval=spread, exact=exact))
    score = sum(entry.score for entry in lengths) / len(lengths)
    return NeedleScore(
        score=score, interval=Interval(low=max(0.0, score - 0.06), high=min(1.0, score + 0.06)),
        exact=sum(entry.exact for entry in lengths) / len(lengths), truncated=sum(item.truncated for item in items),
        errors=0, lengths=tuple(lengths), cells=tuple(cells), items=tuple(items),
    )  # fmt: skip


def agreement(context: int, kl: float, seed: int) -> AgreementScore:
    rng = random.Random(seed)
    agreed = 1 - min(0.9, 0.8 * kl**0.5)
    first = tuple(None if kl == 0 or rng.random() < 0.2 else int(rng.expovariate(kl)) % 256 for _ in range(8))
    ties = sum(index is not None for index in first) // 3
    interval = Interval(low=agreed * 0.98, high=min(1.0, agreed * 1.01))
    return AgreementScore(
        context=context, prompts=8, tokens=2048, first_divergence=first, near_ties=ties, agreement=agreed,
        interval=interval, kl=0.9 * kl, kl_max=11 * kl,
    )  # fmt: skip


def decode_kl(context: int, kl: float) -> DecodeKLScore:
    mean = kl * (context / 8192) ** 0.4
    return DecodeKLScore(
        context=context, passages=4, steps=128, kl=mean, interval=around(mean, 0.2), kl_median=mean / 3,
        kl_p90=2.5 * mean, kl_max=12 * mean, top1=1 - 0.5 * mean**0.5, nll=2.6 + 0.4 * mean, nll_reference=2.6,
    )  # fmt: skip


def scores(kl: float, seed: int = 0) -> TaskScores:
    return TaskScores(
        cache="packed", perplexity=tuple(perplexity(n, kl) for n in LENGTHS), needle=needle(kl, seed),
        agreement=tuple(agreement(n, kl, seed) for n in LENGTHS[:2]),
        decode_kl=tuple(decode_kl(n, kl) for n in LENGTHS),
    )  # fmt: skip


SETTINGS = TaskSettings(
    seed=7, resamples=2000,
    perplexity=PerplexitySettings(contexts=LENGTHS, passages=4, chunk=512, stride=8192, score_from=0.5),
    needle=NeedleSettings(
        tasks=SUBTASKS, contexts=LENGTHS, depths=DEPTHS, items=5, haystack="builtin:noise", haystack_sha256="f" * 64,
        template=True, chunk=512, new_tokens={"single_1": 32, "multivalue": 96},
    ),
    agreement=AgreementSettings(contexts=LENGTHS[:2], prompts=8, new_tokens=256, chunk=512, near_tie=0.1),
    decode_kl=DecodeKLSettings(contexts=LENGTHS, passages=4, steps=32, chunk=512),
)  # fmt: skip


def pairs(rows: list[ArtifactReport]) -> tuple[PairTest, ...]:
    found = []
    for a, b in combinations(rows, 2):
        one, two = ([i.found == i.asked for i in r.tasks.needle.items] for r in (a, b))
        only = (
            sum(x and not y for x, y in zip(one, two, strict=True)),
            sum(y and not x for x, y in zip(one, two, strict=True)),
        )
        found.append(PairTest(task="needle", first=a.name, second=b.name, items=len(one), only_first=only[0],
                              only_second=only[1], difference=(only[0] - only[1]) / len(one),
                              standard_error=math.sqrt(sum(only)) / len(one), p_value=0.0371))  # fmt: skip
    return tuple(found)


@functools.cache
def many_report() -> Report:
    """Twenty methods side by side, with few layers each so that rendering them is quick."""
    report = task_report(MANY)
    rows = [row.model_copy(update={"layers": row.layers[:3]}) for row in report.artifacts]
    return report.model_copy(update={"artifacts": tuple(rows)})


def task_report(methods: dict[str, float] | None = None, *, attention: bool = True, gated: bool = False) -> Report:
    """The sample report with every task, of the sample's methods or of others given with their KL."""
    methods = METHODS if methods is None else methods
    rows = [reference().model_copy(update={"tasks": scores(0.0)})]
    rows += [
        artifact(name, kl, seed).model_copy(update={"tasks": scores(kl, seed)})
        for seed, (name, kl) in enumerate(methods.items())
    ]
    if not attention:
        rows = [row.model_copy(update={"contexts": (), "layers": ()}) for row in rows]
    update = {
        "artifacts": tuple(rows), "tasks": SETTINGS, "pairs": pairs(rows[-3:]), "semantics": "served", "chunk": 512,
        "cached_at": 1024,
    }  # fmt: skip
    return sample_report(gated=gated).model_copy(update=update)


WINDOW_VALUES = ("0/0", "32/128", "64/256", "128/512", "256/1024")


def sweep_report(*, clips: tuple[str, ...] = (), tasks: bool = True) -> Report:
    rows = [reference().model_copy(update={"tasks": scores(0.0) if tasks else None})]
    points = []
    for seed, windows in enumerate(WINDOW_VALUES):
        sink, recent = map(int, windows.split("/"))
        for number, clip in enumerate(clips or ("",)):
            values = (windows, clip) if clip else (windows,)
            axes = ("windows", "clip")[: len(values)]
            name = f"nova[{','.join(f'{a}={v}' for a, v in zip(axes, values, strict=True))}]"
            kl = 0.02 * 0.6**seed * (1 + 0.3 * number)
            row = artifact(name, kl, seed)
            row = row.model_copy(
                update={"method": "nova", "canary": None, "tasks": scores(kl, seed) if tasks else None,
                        "windows": Windows(sink=sink, recent=recent)}
            )  # fmt: skip
            rows.append(row)
            recipe = Recipe(method="nova", windows=Windows(sink=sink, recent=recent))
            points.append(SweepPoint(artifact=name, values=values, recipe=recipe))
    axes = [SweepAxis(key="windows", values=WINDOW_VALUES)]
    axes += [SweepAxis(key="clip", values=clips)] if clips else []
    sweep = Sweep(
        method="nova", settings=("rows=4096",), stats_digest="ab" * 32, axes=tuple(axes), points=tuple(points)
    )
    update = {"artifacts": tuple(rows), "sweep": sweep, "tasks": SETTINGS if tasks else None}
    return sample_report(gated=False).model_copy(update=update)
