"""Scores of servers: the same tables as plain text and as one HTML page."""

from __future__ import annotations

from collections.abc import Iterable

from kvcq.reports.tables import Cell, Column, Group, Table
from kvcq.reports.templating import environment
from kvcq.reports.text import ABSENT, clean, number, percent, plural
from kvcq.spec.scores import ScoresReport


def render_scores(report: ScoresReport) -> str:
    """Return the whole page; the same report gives the same bytes, whatever its `digest` and `files`."""
    return environment().get_template("scores.html.j2").render(
        report=report,
        how=how_asked(report),
        scores=score_table(report),
        pairs=pair_table(report),
        tasks=task_table(report),
        warnings=[clean(line) for line in report.warnings],
        heat_light="",  # the style sheet is that of the other report, whose heat maps this one lacks
        heat_dark="",
    )  # fmt: skip


def scores_text(report: ScoresReport) -> str:
    """Return the scores as plain text: results, paired tests, how it was asked. Ends with a newline."""
    parts = [_drawn(score_table(report))]
    if report.pairs:
        parts += ["Exact McNemar test of majority votes, not corrected for many", _drawn(pair_table(report))]
    parts += [how_asked(report), *(f"! {clean(line)}" for line in report.warnings)]
    return "\n\n".join(parts) + "\n"


def how_asked(report: ScoresReport) -> str:
    """Return one sentence on the sampling."""
    asked = report.sampling
    seeds = f"seed {asked.seed}" if asked.samples == 1 else f"seeds {asked.seed} to {asked.seed + asked.samples - 1}"
    more = "".join(f", {clean(key)} {clean(str(value))}" for key, value in sorted(asked.body.items()))
    return (
        f"{plural(asked.samples, 'answer')} to each item through {asked.api}, temperature {asked.temperature:g}, "
        f"{seeds}, at most {asked.max_tokens} tokens{more}."
    )


def score_table(report: ScoresReport) -> Table:
    """One row a server, grouped by task."""
    columns = (
        Column("Server", numeric=False),
        Column("Score", "Mean over items of the mean over samples"),
        Column("95 % interval", "Percentile bootstrap over items"),
        Column("Majority", "Items that more than half of their samples have right"),
        Column("Answers"),
        Column("Truncated", "Answers that the token limit cut; they count as they stand"),
        Column("Not found", "Texts in which no answer was found; they count as wrong"),
        Column("Tokens", "Mean tokens of an answer, as the server counts"),
    )
    groups = []
    for index, task in enumerate(report.tasks):
        rows = []
        for server in report.servers:
            row = server.tasks[index]
            texts = (
                clean(server.name),
                percent(row.score),
                f"{percent(row.interval.low)} to {percent(row.interval.high)}",
                percent(row.majority),
                str(row.answers),
                str(row.truncated),
                str(row.not_found),
                ABSENT if row.completion_tokens is None else f"{row.completion_tokens:.0f}",
            )
            rows.append(tuple(Cell(text) for text in texts))
        groups.append(Group(f"{clean(task.task)}, {plural(task.items, 'item')}", tuple(rows)))
    return Table(columns, tuple(groups))


def pair_table(report: ScoresReport) -> Table:
    """One row a pair of servers, grouped by task."""
    columns = (
        Column("Servers", numeric=False),
        Column("Difference", "Share right of the first less that of the second"),
        Column("Standard error", "sqrt(discordant items) / items"),
        Column("Only first", "Items that the first alone has right"),
        Column("Only second", "Items that the second alone has right"),
        Column("p", "Exact two-sided McNemar test"),
    )
    groups = []
    for task in report.tasks:
        rows = [
            tuple(
                Cell(text)
                for text in (
                    f"{clean(pair.first)}, {clean(pair.second)}",
                    f"{100 * pair.difference:+.1f}%",
                    percent(pair.standard_error),
                    str(pair.only_first),
                    str(pair.only_second),
                    number(pair.p_value),
                )
            )
            for pair in report.pairs
            if pair.task == task.task
        ]
        groups.append(Group(clean(task.task), tuple(rows)))
    return Table(columns, tuple(groups))


def task_table(report: ScoresReport) -> Table:
    """One row a task: what was asked."""
    columns = (
        Column("Task", numeric=False),
        Column("Items"),
        Column("Metrics", numeric=False),
        Column("SHA-256", "Of the canonical items in order", numeric=False),
    )
    rows = [
        (
            Cell(clean(task.task)),
            Cell(str(task.items)),
            Cell(", ".join(f"{metric} {count}" for metric, count in task.metrics.items())),
            Cell(task.sha256),
        )
        for task in report.tasks
    ]
    return Table(columns, (Group("", tuple(rows)),))


def _drawn(table: Table) -> str:
    """Lay a table out in columns; group titles stand on lines of their own."""
    rows = [[cell.text for cell in row] for group in table.groups for row in group.rows]
    heads = [column.label for column in table.columns]
    widths = [max(len(text) for text in texts) for texts in zip(heads, *rows, strict=True)]

    def line(texts: Iterable[str]) -> str:
        cells = zip(texts, widths, table.columns, strict=True)
        return "  ".join(
            text.rjust(width) if column.numeric else text.ljust(width) for text, width, column in cells
        ).rstrip()

    lines = [line(heads)]
    for group in table.groups:
        lines += [group.title] if group.title else []
        lines += [line(cell.text for cell in row) for row in group.rows]
    return "\n".join(lines)
