"""The report in a terminal: verdict first, then bits, fidelity side by side, worst heads, skips and warnings.

Meaning never depends on colour, and `ascii_only` spells everything in ASCII for streams that know nothing else.
Foreign text is printed as text, never as markup, with its control characters visible.
"""

from __future__ import annotations

from io import StringIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from kvcq.reports import layers, tables, task_tables
from kvcq.reports.stacked import Stacked
from kvcq.reports.summary import closest, contexts, is_reference, reproduction, verdict, warnings
from kvcq.reports.sweep import sweep_sentence, sweep_table
from kvcq.reports.tables import Cell, Table
from kvcq.reports.task_settings import settings
from kvcq.reports.task_summary import flaws, has_tasks
from kvcq.reports.text import clean, context_label, plural, ranges, size, to_ascii
from kvcq.spec.manifest import Manifest
from kvcq.spec.report import Report

WORST_LAYERS = 8
PAIRS = 15
_STYLES = {"": "", "best": "bold cyan", "pass": "green", "fail": "bold red", "muted": "dim"}
_ASCII_HEAD = box.Box("    \n    \n -- \n" + "    \n" * 5, ascii=True)
_BADGES = {"pass": ("PASS", "bold green"), "fail": ("FAIL", "bold red"), "measured": ("MEASURED", "bold cyan")}


def print_report(report: Report, console: Console) -> None:
    """Print a report on a console; its encoding decides between signs and ASCII."""
    ascii_only = not console.encoding.lower().startswith("utf")
    console.print(report_view(report, ascii_only=ascii_only), crop=False)


def report_text(report: Report, *, width: int = 100, ascii_only: bool = False) -> str:
    """Return the report as plain text without any escape sequence."""
    return _plain(report_view(report, ascii_only=ascii_only), width)


def manifest_text(manifest: Manifest, *, width: int = 100, ascii_only: bool = False) -> str:
    """Return the view of a bundle as plain text without any escape sequence."""
    return _plain(manifest_view(manifest, ascii_only=ascii_only), width)


def report_view(report: Report, *, ascii_only: bool = False) -> RenderableType:
    """Return the whole report as one renderable, in the order that every form of a report keeps."""
    write = _Writer(ascii_only)
    judged = verdict(report)
    badge, style = _BADGES[judged.status]
    write.line((badge, style), ("  " + judged.headline, "bold"))
    write.line((judged.detail, ""))
    write.table("", tables.gates_table(report))
    if report.sweep is not None:
        write.table("Sweep (* best point)", sweep_table(report))
        write.line((sweep_sentence(report.sweep), "dim"))
    write.table("Bits per element, everything counted", tables.bits_table(report))
    write.table("Bytes per token", tables.bytes_table(report))
    _tasks(write, report)
    write.table("Fidelity against BF16 (* best quantized value)", tables.report_fidelity(report))
    write.table("Keys read from codes, not from exact windows", layers.share_table(report))
    longest = context_label(max(contexts(report), default=0))
    write.table(f"Worst layers and heads, mean KL in nats at {longest}", tables.worst_table(report))
    best = closest(report)
    if best is not None and best.layers:
        shown, total = min(WORST_LAYERS, len(best.layers)), len(best.layers)
        title = f"Layers of {clean(best.name)} at {longest}, worst first ({shown} of {total})"
        write.table(title, layers.layer_table(best, count=WORST_LAYERS))
    write.table("Kept in BF16", tables.skipped_table(report))
    write.table("Value rotation undone at run time", tables.unfolded_table(report))
    if found := warnings(report):
        write.heading("Warnings")
        for whom, text in found:
            write.line(("! ", "yellow"), (f"{whom}: ", "bold"), (text, ""))
    if report.command:
        write.heading("Reproduce")
        write.verbatim(clean(report.command))
        write.line((reproduction(report), ""))
    return write.group()


def _tasks(write: _Writer, report: Report) -> None:
    """Write the tables of the model-level tasks that ran, and what their numbers depend on."""
    if not has_tasks(report):
        return
    rows = report.artifacts
    write.table("Perplexity through the cache (* best quantized value)", task_tables.perplexity_table(rows))
    write.table("Needles found", task_tables.needle_table(rows))
    if found := flaws(report):
        write.line((found, "dim"))
    write.table("Needles found by subtask", task_tables.subtask_table(rows))
    write.table("Greedy tokens against BF16", task_tables.agreement_table(rows))
    write.table("KL of the next token by context", task_tables.decode_kl_table(rows))
    about, best = None, closest(report)
    if len(report.pairs) > PAIRS:
        about = [row.name for row in rows if is_reference(row) or row is best]
    write.table("Exact McNemar tests on the same items, not corrected for many", task_tables.pairs_table(report, about))
    if about:
        names = " or ".join(map(clean, about))
        write.line((f"Only those with {names}; report.html has all {len(report.pairs)}.", "dim"))
    if asked := settings(report):
        write.heading("Settings of the tasks")
        for label, text in asked:
            write.line((f"{label}: ", "dim"), (text, ""))


def manifest_view(manifest: Manifest, *, ascii_only: bool = False) -> RenderableType:
    """Return what a bundle holds: gates, bits, fidelity, kept layers, digests."""
    write = _Writer(ascii_only)
    gates = manifest.validation.gates
    failed = sum(not gate.passed for gate in gates)
    badge, style = _BADGES["fail" if failed else "pass" if gates else "measured"]
    said = f"{failed} of {plural(len(gates), 'gate')} failed" if failed else f"{plural(len(gates), 'gate')} passed"
    write.line((badge, style), (f"  {said}" if gates else "  no gates were set", "bold"))
    quantized = [entry.layer for entry in manifest.plan if entry.quantized]
    recipe, windows = manifest.recipe, manifest.recipe.windows
    write.facts(
        ("Model", clean(manifest.provenance.source)),
        ("Method", clean(recipe.method) + "".join(f" {clean(k)}={clean(str(v))}" for k, v in recipe.params.items())),
        ("Layers", f"{len(quantized)} of {len(manifest.plan)} quantized ({ranges(quantized) or 'none'})"),
        ("Windows", f"{windows.sink} sink + {windows.recent} recent tokens exact"),
        ("Context", f"fitted for {manifest.target_context}, collected up to {manifest.collected_context}"),
        ("Constants", size(manifest.constants_bytes)),
        ("Tensors", manifest.tensors_digest),
        ("Digest", manifest.digest),
    )
    write.table("Bits per element, everything counted", tables.manifest_bits(manifest))
    write.table("Fidelity against BF16", tables.manifest_fidelity(manifest))
    write.table("Kept in BF16", tables.manifest_skipped(manifest))
    return write.group()


class _Writer:
    """Collects renderables; the one place that decides about signs."""

    def __init__(self, ascii_only: bool) -> None:
        self.ascii_only = ascii_only
        self.parts: list[RenderableType] = []

    def spell(self, text: str) -> str:
        return to_ascii(text) if self.ascii_only else text

    def line(self, *spans: tuple[str, str]) -> None:
        self.parts.append(Text.assemble(*((self.spell(text), style) for text, style in spans)))

    def verbatim(self, text: str) -> None:
        """Add a line to be copied: it is never wrapped."""
        self.parts.append(Text(self.spell(text), no_wrap=True, overflow="ignore"))

    def heading(self, title: str) -> None:
        self.parts.append(Text(""))
        self.line((title, "bold"))

    def facts(self, *pairs: tuple[str, str]) -> None:
        grid = RichTable.grid(padding=(0, 2))
        for name, value in pairs:
            grid.add_row(Text(name, style="dim"), Text(self.spell(value), overflow="fold"))
        self.parts.append(grid)

    def table(self, title: str, table: Table) -> None:
        if not table:
            return
        self.heading(title) if title else self.parts.append(Text(""))
        lines = _ASCII_HEAD if self.ascii_only else box.SIMPLE_HEAD
        drawn = RichTable(box=lines, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for column in table.columns:
            label, numeric = self.spell(column.narrow or column.label), column.numeric
            drawn.add_column(label, justify="right" if numeric else "left", overflow="fold", no_wrap=numeric)
        for number, group in enumerate(table.groups):
            if group.title:
                self._rows_under(drawn, group.title, len(table.columns), first=number == 0)
            for row in group.rows:
                drawn.add_row(*map(self._cell, row))
        self.parts.append(Stacked(drawn))

    def _cell(self, cell: Cell) -> Text:
        text = Text(self.spell(("*" if cell.tone == "best" else "") + cell.text), _STYLES[cell.tone])
        return text.append(self.spell(f" ({cell.remark})"), "dim") if cell.remark else text

    def _rows_under(self, drawn: RichTable, title: str, columns: int, *, first: bool) -> None:
        # A table cell cannot span columns: the short form of the context stands in the first one.
        if not first:
            drawn.add_section()
        drawn.add_row(Text(self.spell(title.split(" · ")[0]), "bold"), *[""] * (columns - 1))

    def group(self) -> Group:
        return Group(*self.parts)


def _plain(view: RenderableType, width: int) -> str:
    stream = StringIO()
    console = Console(file=stream, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(view, crop=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"
