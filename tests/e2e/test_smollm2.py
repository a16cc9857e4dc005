"""Text to packed bundle on a real model, as one process: what ``kvcq quickstart`` promises."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.chain import python
from tests.e2e.conftest import Quickstart

pytestmark = [pytest.mark.slow, pytest.mark.network]

ORDER = ("naive-int2", "quarot-int2", "oscar", "oscar-centered", "nova")


def test_methods_come_out_in_their_order(quick: Quickstart) -> None:
    kl = quick.answer["kl"]
    assert set(kl) == {"bf16 reference", *ORDER}
    assert all(kl[worse] > kl[better] for worse, better in pairwise(ORDER))
    assert kl["bf16 reference"] < 1e-4


# Mean KL at 2k of an implementation that shares no code with kvcq, in float64, over seven layers.
INDEPENDENT = {"naive-int2": 0.546, "quarot-int2": 0.172, "oscar": 0.109, "oscar-centered": 0.061, "nova": 0.022}


@pytest.mark.parametrize("method", ORDER)
def test_fidelity_agrees_with_an_independent_check_within_a_factor_of_two(quick: Quickstart, method: str) -> None:
    assert 0.5 < quick.answer["kl"][method] / INDEPENDENT[method] < 2.0


def test_answer_names_what_was_made(quick: Quickstart) -> None:
    answer = quick.answer
    assert set(answer["seconds"]) == {"collect", "fit", "validate", "pack", "verify"}
    assert Path(answer["bundle"]).name == "smollm2-135m-nova.kvcq" and len(answer["digest"]) == 64
    assert {path.name for path in quick.out.iterdir()} == {"stats", "fits", "report", "smollm2-135m-nova.kvcq"}
    assert not any("Traceback" in line or "%|" in line for line in quick.progress)


def test_bundle_verifies_in_a_process_without_torch(quick: Quickstart) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; "
        "from kvcq.cli.main import run; sys.argv = ['kvcq', 'verify', sys.argv[1], '--json']; run()"
    )
    done = python("-c", code, quick.answer["bundle"])
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["ok"] and answer["kind"] == "bundle" and answer["digest"] == quick.answer["digest"]


def test_bundle_states_the_model_and_honest_bits(quick: Quickstart) -> None:
    done = python("-m", "kvcq", "inspect", quick.answer["bundle"], "--json")
    header = json.loads(done.stdout)["header"]
    assert header["recipe"]["method"] == "nova" and header["provenance"]["source"] == "smollm2-135m"
    assert sum(entry["k"] is not None for entry in header["plan"]) == len(header["plan"]) == 30
    longest = header["bits"][-1]
    assert longest["context"] == 131072 and 2.5 < longest["total"] < 2.6
    assert all(fold["fold"] for fold in header["folds"])
    assert header["validation"]["contexts"][-1]["metrics"]["kl"] == quick.answer["kl"]["nova"]


def test_report_page_shows_every_artifact(quick: Quickstart) -> None:
    page = (quick.out / "report" / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in ORDER) and "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org", "") and str(quick.out) not in page


def test_a_second_run_does_not_touch_the_first(quick: Quickstart) -> None:
    done = python("-m", "kvcq", "quickstart", "--out", str(quick.out))
    assert done.returncode == 2 and done.stdout == b"" and done.stderr.count(b"\n") == 1
    assert b"--force" in done.stderr
