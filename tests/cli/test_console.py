"""Progress without a terminal: a line a stage, and one now and then within a long stage."""

from __future__ import annotations

import pytest

from kvcq.cli import console as module
from kvcq.cli.console import Console


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def tell(interval: float, **options: bool) -> tuple[str, str]:
        monkeypatch.setattr(module, "LINE_INTERVAL", interval)
        with Console(**options) as console:
            console.stage("measuring")
            for done in (1, 2):
                console.advance(done, 2, "layers")
            console.note("a note\nof two lines")
            console.warn("a warning")
        console.result("the result", {"b": "é", "a": 1})
        return capsys.readouterr()

    return tell


def test_long_stages_show_where_they_are(told) -> None:
    out, err = told(0.0)
    lines = ["measuring", "measuring: 1/2 layers", "measuring: 2/2 layers", "a note of two lines", "warning: a warning"]
    assert err.splitlines() == lines and out == "the result\n"


def test_short_stages_show_one_line(told) -> None:
    assert told(60.0)[1].splitlines() == ["measuring", "a note of two lines", "warning: a warning"]


def test_quiet_keeps_warnings_and_json_is_one_sorted_object(told) -> None:
    out, err = told(0.0, quiet=True, json=True)
    assert err == "warning: a warning\n" and out == '{"a": 1, "b": "é"}\n'


def test_closing_of_a_console_is_idempotent() -> None:
    console = Console()
    with console:
        pass
    console.__exit__()
