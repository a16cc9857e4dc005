"""Human forms of a report: terminal tables, self-contained HTML, the bundle's card."""

from kvcq.reports.card import bundle_card
from kvcq.reports.html import render_html
from kvcq.reports.summary import Verdict, verdict
from kvcq.reports.terminal import manifest_text, print_report, report_text

__all__ = [
    "Verdict",
    "bundle_card",
    "manifest_text",
    "print_report",
    "render_html",
    "report_text",
    "verdict",
]
