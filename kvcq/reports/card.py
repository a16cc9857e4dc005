"""The model card of a bundle: ``README.md`` with the front matter that the hub reads."""

from __future__ import annotations

import json
import re

from kvcq.reports import tables, task_tables
from kvcq.reports.layers import head_table, layer_table
from kvcq.reports.summary import by_reason, gate_sentence
from kvcq.reports.tables import Cell, Column, Group, Table
from kvcq.reports.task_summary import task_clauses
from kvcq.reports.templating import environment
from kvcq.reports.text import clean, context_label, number, ranges, size
from kvcq.spec.manifest import Manifest
from kvcq.spec.report import ArtifactReport

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&])")
_FENCE = re.compile("`")
WORST = 5
_SLUG = re.compile(r"[^a-z0-9]+")


def bundle_card(manifest: Manifest, row: ArtifactReport | None = None, command: str = "") -> str:
    """Return ``README.md`` of a bundle. The same manifest gives the same bytes.

    The card is one of the files that the manifest lists, so it reads neither `digest` nor `files`: pack renders it
    from a draft whose digest is still zeros. It quotes the digests of tensors, statistics and report instead.

    Args:
        manifest: What was sealed, or is about to be.
        row: The sealed report's row of these tensors, for the layers and heads that lose most.
        command: The command that repeats the measurement.
    """
    quantized = [entry for entry in manifest.plan if entry.quantized]
    sides = quantized[0] if quantized else None
    source = manifest.provenance.source
    return environment().get_template("card.md.j2").render(
        base_model=json.dumps(source) if _HUB_ID.fullmatch(source) else None,
        tag=json.dumps(_SLUG.sub("-", manifest.recipe.method.lower()).strip("-") or "method"),
        source=markdown(source),
        method=markdown(manifest.recipe.method),
        revision=markdown(manifest.provenance.revision or ""),
        params=", ".join(f"{markdown(k)} = {markdown(str(v))}" for k, v in sorted(manifest.recipe.params.items())),
        manifest=manifest,
        layers=ranges(entry.layer for entry in quantized),
        quantized=len(quantized),
        k=sides.k if sides else None,
        v=sides.v if sides else None,
        heads=sorted({(g.q_heads, g.kv_heads, g.d_k, g.d_v) for g in manifest.geometry.quantizable()}),
        bits=markdown_table(tables.manifest_bits(manifest)),
        fidelity=markdown_table(tables.manifest_fidelity(manifest)),
        legend=[(markdown(m.column.label), markdown(m.column.help)) for m in tables.METRICS],
        skipped=markdown_table(tables.manifest_skipped(manifest)),
        gates=[(markdown(gate_sentence(g)), number(g.value), g.passed) for g in manifest.validation.gates],
        worst_layers="" if row is None else markdown_table(layer_table(row, count=WORST)),
        worst_heads="" if row is None else markdown_table(head_table(row, WORST)),
        tasks=[] if row is None else [(title, markdown_groups(table)) for title, table in _task_tables(row)],
        task_sentence="" if row is None else markdown(", ".join(task_clauses(row.tasks))),
        command=_FENCE.sub("'", clean(command)),
        unfolded=[(numbers, markdown(reason)) for reason, numbers in _unfolded(manifest).items()],
        folded=sum(fold.fold for fold in manifest.folds),
        sources=", ".join(map(markdown, manifest.calibration.sources)),
        constants=size(manifest.constants_bytes),
        target=context_label(manifest.target_context),
        version=markdown(manifest.kvcq),
        identity=manifest.identity.digest(),
    )  # fmt: skip


def _task_tables(row: ArtifactReport) -> list[tuple[str, Table]]:
    """Return (title, table) of every task that this row has results of."""
    found = [
        ("Perplexity", task_tables.perplexity_table([row])),
        ("Needles found", task_tables.needle_table([row])),
        ("Greedy tokens against BF16", task_tables.agreement_table([row])),
        ("KL of the next token", task_tables.decode_kl_table([row])),
    ]
    return [(title, table) for title, table in found if table]


def _unfolded(manifest: Manifest) -> dict[str, str]:
    return by_reason({fold.layer: fold.reason for fold in manifest.folds if not fold.fold})


def markdown(text: str) -> str:
    """Escape foreign text for one line of Markdown: no markup, HTML, link or table cell can start in it."""
    escaped = _SPECIAL.sub(r"\\\1", clean(text)).replace("\\<", "&lt;").replace("\\>", "&gt;").replace("\\&", "&amp;")
    return escaped.replace("://", ":\\//").replace("www.", "www\\.")


def markdown_groups(table: Table) -> str:
    """Draw a table whose rows are told apart by their group: its title, up to what was counted, comes first."""
    if not any(group.title for group in table.groups):
        return markdown_table(Table(table.columns[1:], tuple(_without_names(group) for group in table.groups)))
    rows = tuple(
        (Cell(group.title.split(" · ")[0].removeprefix("Context ")), *row[1:])
        for group in table.groups
        for row in group.rows
    )
    return markdown_table(Table((Column("Context"), *table.columns[1:]), (Group("", rows),)))


def _without_names(group: Group) -> Group:
    return Group(group.title, tuple(row[1:] for row in group.rows))


def markdown_table(table: Table) -> str:
    """Draw a table of one group in Markdown, numbers right aligned; an empty table gives an empty text."""
    if not table:
        return ""
    lines = [
        [markdown(column.label) for column in table.columns],
        ["---:" if column.numeric else "---" for column in table.columns],
        *([markdown(cell.text) for cell in row] for group in table.groups for row in group.rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
