import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from kvcq.reports import manifest_text, print_report, report_text
from tests.reports.sample import METHODS, artifact, reference, sample_manifest, sample_report

ORDER = ["FAIL", "Bits per element", "Bytes per token", "Fidelity against", "Keys read from codes", "Worst layers",
         "Layers of nova at 8k, worst first", "Kept in BF16", "Value rotation undone", "Warnings",
         "Reproduce"]  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_verdict_comes_first_and_the_order_is_kept(width):
    text = report_text(sample_report(), width=width)
    places = [text.index(title) for title in ORDER]
    assert places == sorted(places) and places[0] == 0
    assert "3 of 5 gates failed: naive-int2, quarot-int2" in text
    assert "nova is closest to BF16 at 8k" in text


def test_artifacts_stand_side_by_side_at_every_context():
    text = report_text(sample_report(), width=80)
    fidelity = text[text.index("Fidelity") : text.index("Keys read")]
    blocks = fidelity.split("Context ")[1:]
    assert [block.split()[0] for block in blocks] == ["2k", "4k", "8k"]
    for block in blocks:
        names = [line.split()[0] for line in block.splitlines()[1:] if line.strip()]
        assert [name for name in names if name != "reference"] == ["bf16", *METHODS]
    assert "*0.0114" in blocks[-1]  # the best value is marked without colour
    assert max(map(len, fidelity.splitlines())) <= 80


def test_verdicts_without_failures():
    report = sample_report()
    kept = report.model_copy(update={"gates": tuple(gate for gate in report.gates if gate.passed)})
    assert report_text(kept).startswith("PASS  All 2 gates hold")
    assert report_text(kept.model_copy(update={"gates": kept.gates[:1]})).startswith("PASS  The gate holds")
    bare = report.model_copy(update={"gates": (), "artifacts": (reference(),), "warnings": (), "command": ""})
    text = report_text(bare)
    assert text.startswith("MEASURED  Measured, no gates were set\nOnly the BF16 reference was measured.")
    assert "Warnings" not in text and "Reproduce" not in text and "Worst" not in text


def test_a_single_artifact_needs_no_comparison_mark():
    report = sample_report(gated=False).model_copy(update={"artifacts": (reference(), artifact("nova", 0.01))})
    text = report_text(report)
    assert "nova was measured at 8k" in text and "*0" not in text


def test_missing_measurements_show_as_absent():
    lone = artifact("nova", 0.01).model_copy(
        update={"contexts": (), "bits": {}, "storage": (), "bytes_per_token": None, "constants_bytes": None}
    )
    text = report_text(sample_report(gated=False).model_copy(update={"artifacts": (reference(), lone)}))
    row = next(line for line in text.splitlines() if line.startswith("nova") and "–" in line)
    assert row.count("–") > 2


@pytest.mark.parametrize("view", [lambda: report_text(sample_report(), ascii_only=True),
                                  lambda: manifest_text(sample_manifest(), ascii_only=True)])  # fmt: skip
def test_the_ascii_form_is_ascii(view):
    text = view()
    assert text.isascii() and "\x1b" not in text


def test_a_stream_that_knows_only_ascii_gets_ascii():
    for encoding in ("ascii", "cp1252"):
        raw = io.BytesIO()
        console = Console(file=io.TextIOWrapper(raw, encoding=encoding), width=80)
        print_report(sample_report(), console)
        console.file.flush()
        assert raw.getvalue().isascii() and b"FAIL  3 of 5 gates failed" in raw.getvalue()


def test_the_c_locale_never_crashes():
    code = (
        "from rich.console import Console; from kvcq.reports import print_report; from tests.reports.sample import *; "
    )
    code += "print_report(sample_report(), Console())"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(b"FAIL") and run.stdout.isascii() and b"\x1b" not in run.stdout


def test_hostile_names_are_printed_as_text():
    name = "[bold]x[/]\x1b[2J\u202e"
    report = sample_report(gated=False).model_copy(update={"artifacts": (reference(), artifact(name, 0.01))})
    text = report_text(report, width=140)
    assert "[bold]x[/]\\x1b[2J\\u202e" in text and "\x1b" not in text and "\u202e" not in text


def test_the_command_is_never_wrapped():
    report = sample_report()
    assert report.command in report_text(report, width=60)


def test_a_bundle_shows_its_digests_and_bits():
    text = manifest_text(sample_manifest())
    assert text.startswith("PASS  1 gate passed")
    assert "5" * 64 in text and "2" * 64 in text and "28 of 30 quantized (1-14, 16-29)" in text
    assert "3.25" in text and "0.0114" in text and "kept by skip_layers" in text


def test_a_bundle_without_gates_or_with_failures_says_so():
    manifest = sample_manifest()
    bare = manifest.validation.model_copy(update={"gates": ()})
    assert manifest_text(manifest.model_copy(update={"validation": bare})).startswith("MEASURED  no gates")
    failed = manifest.validation.gates[0].model_copy(update={"passed": False})
    broken = manifest.validation.model_copy(update={"gates": (failed,)})
    assert manifest_text(manifest.model_copy(update={"validation": broken})).startswith("FAIL  1 of 1 gate failed")


def test_colour_appears_only_on_a_colour_terminal():
    for colour, expected in ((None, False), ("standard", True)):
        stream = io.StringIO()
        print_report(sample_report(), Console(file=stream, force_terminal=True, color_system=colour, width=90))
        assert ("\x1b[1;31m" in stream.getvalue()) is expected
