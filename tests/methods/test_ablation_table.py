"""The benchmark of the papers' ablations: its rows are methods, and its table says what a report says."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from kvcq.pipeline.recipes import apply_settings, resolve
from tests.reports.sample import sample_report
from tests.scripts import load_benchmark


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        yield load_benchmark(patch, "ablations")


def test_every_row_is_a_method_with_these_settings(script: ModuleType) -> None:
    names = [row.name for row in script.ROWS]
    assert len(set(names)) == len(names)
    for row in script.ROWS:
        settings = [*row.settings, *(["signs=1"] if row.draws else []), *(["iterations=1"] if row.codebooks else [])]
        resolve(apply_settings({"method": row.method}, settings), row.name)
    assert {name for _, *pair in script.ORDERS for name in pair} <= set(names)


def test_draws_are_averaged_and_orders_judged(script: ModuleType) -> None:
    report = sample_report()
    by_name = {entry.name: entry for entry in report.artifacts}
    fits = {"quarot-int2": ["quarot-int2"], "oscar": ["oscar", "klt-int2"], "nova": ["nova"]}
    groups = script.grouped(report, fits)
    assert list(groups) == ["bf16 reference", *fits]
    context = report.artifacts[1].contexts[-1].context
    draws = [by_name[name].contexts[-1].metrics.kl for name in fits["oscar"]]
    script.LONG = context  # the sample states no longer one
    (row,) = [line for line in script.table(groups, (2048, context)).splitlines() if line.startswith("| oscar |")]
    assert row.split(" | ")[1] == "2"
    assert f"{sum(draws) / 2:.4f}" in row
    assert f"{min(draws):.4f} .. {max(draws):.4f}" in row
    lines = script.orders(groups, context).splitlines()
    assert len(lines) == 4
    assert all("as the" in line for line in lines)
    swapped = script.orders(groups | {"nova": groups["quarot-int2"]}, context)
    assert "nova 0.2100, oscar 0.0780: differs from the NOVA-KV paper" in swapped
