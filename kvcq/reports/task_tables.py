"""Tables of the model-level tasks, for terminal, HTML and card alike; a table without rows is false."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from statistics import median

from kvcq.reports.summary import is_reference
from kvcq.reports.tables import NAME, Cell, Column, Group, Table, Tone, flat, name_cell
from kvcq.reports.task_summary import at_context, contexts_of, needle_grid, needle_subtasks, subtask_label
from kvcq.reports.text import ABSENT, clean, context_label, factor, number, percent, plural, quantity
from kvcq.spec.report import ArtifactReport, Report
from kvcq.spec.tasks import AgreementScore, DecodeKLScore, Interval, NeedleScore, PerplexityScore

CI = "95 % percentile bootstrap interval"
SCORE = Column("Found", "Share of the asked needles in the answers, mean over items")
EXACT = Column("All found", "Items in whose answer every asked needle stands", narrow="All\nfound")


def perplexity_table(artifacts: Sequence[ArtifactReport]) -> Table:
    """Perplexity and its ratio to the BF16 cache, one group a context."""
    columns = (
        NAME,
        Column("Perplexity", "exp of the mean loss of the scored tokens, read through the cache"),
        Column("95 % CI", f"{CI} of the perplexity, blocks of tokens resampled"),
        Column("× BF16", "Perplexity over that of the BF16 cache on the same tokens"),
        Column("CI of ×", f"{CI} of the ratio, the same blocks resampled on both sides"),
    )

    def row(score: PerplexityScore) -> tuple[str, ...]:
        own, ratio = _interval(score.interval, quantity), _interval(score.ratio_interval, _ratio)
        return quantity(score.perplexity), own, _ratio(score.ratio), ratio

    def title(score: PerplexityScore) -> str:
        return f"{plural(score.passages, 'passage')}, {score.tokens:,} tokens scored"

    return _by_context(artifacts, columns, lambda a: a.tasks.perplexity if a.tasks else (), row, title, {
        0: (min, lambda s: s.perplexity), 2: (min, lambda s: s.ratio)})  # fmt: skip


def decode_kl_table(artifacts: Sequence[ArtifactReport]) -> Table:
    """Divergence of next-token distributions after each context."""
    columns = (
        NAME,
        Column("KL", "Mean KL(BF16 || quantized) of the next token over the whole vocabulary, in nats"),
        Column("95 % CI", f"{CI} of the mean, blocks of up to 8 steps resampled"),
        Column("Median", "Median over the steps"),
        Column("p90", "90th percentile over the steps"),
        Column("Max", "Largest of a step"),
        Column("Top-1", "Steps with the likeliest token of the BF16 cache"),
        Column("Loss", "Mean loss of the tokens, minus that under the BF16 cache, in nats"),
    )

    def row(score: DecodeKLScore) -> tuple[str, ...]:
        spread = (number(score.kl_median), number(score.kl_p90), number(score.kl_max))
        loss = score.nll - score.nll_reference
        return number(score.kl), _interval(score.interval), *spread, percent(score.top1), _signed(loss)

    def title(score: DecodeKLScore) -> str:
        return f"{plural(score.passages, 'passage')}, {plural(score.steps, 'step')}"

    return _by_context(artifacts, columns, lambda a: a.tasks.decode_kl if a.tasks else (), row, title, {
        0: (min, lambda s: s.kl), 5: (max, lambda s: s.top1)})  # fmt: skip


def agreement_table(artifacts: Sequence[ArtifactReport]) -> Table:
    """Greedy generation against that of the BF16 cache."""
    columns = (
        NAME,
        Column("Same token", "Steps whose likeliest token is that of BF16, its own tokens fed", narrow="Same\ntoken"),
        Column("95 % CI", f"{CI}, blocks of up to 8 steps resampled"),
        Column("Diverged", "Prompts whose own greedy continuation differs somewhere", narrow="Diver-\nged"),
        Column("First", "Earliest differing token of any prompt, counted from 0"),
        Column("Median", "Median over prompts of the first differing token; none counts as the end"),
        Column("Near-ties", "First differences where BF16 itself is undecided", narrow="Near-\nties"),
        Column("KL", "Mean KL(BF16 || quantized) along the tokens of the BF16 cache, in nats"),
        Column("KL max", "Largest of a step", narrow="KL\nmax"),
    )

    def row(score: AgreementScore) -> tuple[str, ...]:
        first, middle = divergence(score)
        diverged = sum(index is not None for index in score.first_divergence)
        return (
            percent(score.agreement),
            _interval(score.interval, percent),
            f"{diverged} of {score.prompts}",
            first,
            middle,
            str(score.near_ties),
            number(score.kl),
            number(score.kl_max),
        )

    def title(score: AgreementScore) -> str:
        return f"{plural(score.prompts, 'prompt')}, {score.tokens:,} tokens"

    return _by_context(artifacts, columns, lambda a: a.tasks.agreement if a.tasks else (), row, title, {
        0: (max, lambda s: s.agreement), 6: (min, lambda s: s.kl)})  # fmt: skip


def divergence(score: AgreementScore) -> tuple[str, str]:
    """Return the earliest first divergence and the median over prompts; a prompt without one counts as infinite."""
    places = sorted(float("inf") if index is None else float(index) for index in score.first_divergence)
    if not places:
        return ABSENT, ABSENT
    return _place(places[0]), _place(median(places))


def _place(value: float) -> str:
    return "none" if value == float("inf") else f"{value:g}"


def needle_table(artifacts: Sequence[ArtifactReport]) -> Table:
    """Retrieval over all items, and by context; cut answers and failed items are counted."""
    found = _needles(artifacts)
    lengths = sorted({entry.context for _, needle in found for entry in needle.lengths})
    failed = any(needle.errors for _, needle in found)
    columns = (
        NAME,
        SCORE,
        Column("95 % CI", f"{CI} of the share found, items resampled"),
        EXACT,
        *(Column(context_label(n), f"Share found at {n} tokens") for n in lengths),
        Column("Cut", "Answers that reached the token limit; judged as they stood"),
        *((Column("Failed", "Items that failed to run"),) if failed else ()),
    )
    best = _best(found, lambda n: n.score)
    best_exact = _best(found, lambda n: n.exact)
    rows = []
    for artifact, needle in found:
        at, tone = {entry.context: percent(entry.score) for entry in needle.lengths}, _plain(artifact)
        rows.append((
            name_cell(artifact), Cell(percent(needle.score), _tone(artifact, needle.score, best)),
            Cell(_interval(needle.interval, percent), tone),
            Cell(percent(needle.exact), _tone(artifact, needle.exact, best_exact)),
            *(Cell(at.get(n, ABSENT), tone) for n in lengths),
            Cell(f"{needle.truncated} of {len(needle.items)}", tone),
            *((Cell(str(needle.errors), tone),) if failed else ()),
        ))  # fmt: skip
    return flat(columns, rows)


def subtask_table(artifacts: Sequence[ArtifactReport]) -> Table:
    """Share of needles found by subtask, all contexts and depths together; empty for a single subtask."""
    found = [(artifact, needle_subtasks(needle)) for artifact, needle in _needles(artifacts)]
    names = list(dict.fromkeys(name for _, own in found for name in own))
    if len(names) < 2:
        return Table((NAME,))
    columns = [NAME]
    for name in names:
        label, narrow = subtask_label(name)
        items = max(own[name].items for _, own in found if name in own)
        columns.append(Column(clean(label), f"Share found in {plural(items, 'item')}", narrow=_lines(narrow)))
    rows = [
        (name_cell(a), *(Cell(percent(own[name].score) if name in own else ABSENT, _plain(a)) for name in names))
        for a, own in found
    ]
    return flat(columns, rows)


def depth_table(needle: NeedleScore) -> Table:
    """The heat map of one artifact as a table: depths by contexts."""
    grid = needle_grid(needle)
    lengths = sorted({context for context, _ in grid})
    columns = (
        Column("Depth", "Where the first needle stands, percent of the haystack", numeric=False),
        *(Column(context_label(n), f"Share found at {n} tokens, and the number of items") for n in lengths),
    )
    rows = []
    for depth in sorted({depth for _, depth in grid}):
        squares = (grid.get((n, depth)) for n in lengths)
        rows.append(
            (Cell(f"{depth:g} %"), *(Cell(f"{percent(s.score)} of {s.items}" if s else ABSENT) for s in squares))
        )
    return flat(columns, rows)


def pairs_table(report: Report, about: Collection[str] | None = None) -> Table:
    """Paired tests between artifacts, in the order of the report; only those of the rows named in `about`, if given."""
    columns = (
        Column("Task", numeric=False),
        Column("First", numeric=False),
        Column("Second", numeric=False),
        Column("Items", "Items that both answered"),
        Column("Only 1st", "Items that the first alone got right", narrow="Only\n1st"),
        Column("Only 2nd", "Items that the second alone got right", narrow="Only\n2nd"),
        Column("Difference", "Share right of the first minus that of the second, with its standard error"),
        Column("p", "Exact two-sided McNemar test of equal shares; not corrected for the number of tests"),
    )
    rows = [
        (
            Cell(clean(pair.task)),
            Cell(clean(pair.first)),
            Cell(clean(pair.second)),
            Cell(str(pair.items)),
            Cell(str(pair.only_first)),
            Cell(str(pair.only_second)),
            Cell(f"{100 * pair.difference:+.1f} ± {100 * pair.standard_error:.1f} %"),
            Cell(number(pair.p_value)),
        )
        for pair in report.pairs
        if about is None or pair.first in about or pair.second in about
    ]
    return flat(columns, rows)


def _by_context(
    artifacts: Sequence[ArtifactReport],
    columns: tuple[Column, ...],
    scores: Callable[[ArtifactReport], Sequence[PerplexityScore | DecodeKLScore | AgreementScore]],
    row: Callable[..., tuple[str, ...]],
    title: Callable[..., str],
    ranked: dict[int, tuple[Callable[[Iterable[float]], float], Callable[..., float]]],
) -> Table:
    """One group a context, one row an artifact; `ranked` marks the best quantized value of a column of numbers."""
    own = [(artifact, scores(artifact)) for artifact in artifacts]
    groups = []
    for context in contexts_of(score for _, found in own for score in found):
        here = [(artifact, at_context(found, context)) for artifact, found in own]
        measured = [score for artifact, score in here if score is not None and not is_reference(artifact)]
        best = {n: choose(map(read, measured)) for n, (choose, read) in ranked.items() if len(measured) > 1}
        rows = []
        for artifact, score in here:
            if score is None:
                rows.append((name_cell(artifact), *(Cell(ABSENT, "muted") for _ in columns[1:])))
                continue
            cells = [
                Cell(text, _tone(artifact, ranked[n][1](score), best[n]) if n in best else _plain(artifact))
                for n, text in enumerate(row(score))
            ]
            rows.append((name_cell(artifact), *cells))
        some = next(score for _, score in here if score is not None)
        groups.append(Group(f"Context {context_label(context)} · {title(some)}", tuple(rows)))
    return Table(columns, tuple(groups))


def _needles(artifacts: Sequence[ArtifactReport]) -> list[tuple[ArtifactReport, NeedleScore]]:
    return [(a, a.tasks.needle) for a in artifacts if a.tasks is not None and a.tasks.needle is not None]


def _best(found: Sequence[tuple[ArtifactReport, NeedleScore]], read: Callable[[NeedleScore], float]) -> float | None:
    values = [read(needle) for artifact, needle in found if not is_reference(artifact)]
    return max(values) if len(values) > 1 else None


def _tone(artifact: ArtifactReport, value: float, best: float | None) -> Tone:
    return "muted" if is_reference(artifact) else "best" if value == best else ""


def _plain(artifact: ArtifactReport) -> Tone:
    return "muted" if is_reference(artifact) else ""


def _interval(interval: Interval, write: Callable[[float], str] = number) -> str:
    low, high = write(interval.low), write(interval.high)
    return f"{low.removesuffix('%')}–{high}" if high.endswith("%") else f"{low}–{high}"


def _ratio(value: float) -> str:
    return factor(value).removesuffix("×")


def _signed(value: float) -> str:
    return ("−" if value < 0 else "+") + number(abs(value))


def _lines(text: str) -> str:
    return "\n".join(map(clean, text.split("\n")))
