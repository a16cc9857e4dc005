"""Records of model-level tasks: files written before they existed keep their one canonical form."""

from pathlib import Path

import pytest

from kvcq.artifacts.seal import decode, encode, seal
from kvcq.errors import CorruptArtifactError
from kvcq.spec import canonical
from kvcq.spec.report import Report
from kvcq.spec.tasks import Interval, PairTest, TaskScores, TaskSettings

FIRST = Path(__file__).parents[1] / "golden" / "report-first.json"


def test_a_report_of_the_first_format_loads_and_keeps_its_bytes():
    data = FIRST.read_bytes()
    report = decode(data, Report, "report.json")
    assert report.tasks is None and report.artifacts[0].tasks is None and report.pairs == ()
    assert encode(report) == data


def test_scores_and_settings_survive_the_round_trip():
    report = decode(FIRST.read_bytes(), Report, "report.json")
    row = report.artifacts[0].model_copy(update={"tasks": TaskScores(cache="packed")})
    pair = PairTest(
        task="needle",
        first="a",
        second="b",
        items=2,
        only_first=1,
        only_second=0,
        difference=0.5,
        standard_error=0.5,
        p_value=1.0,
    )
    update = {"artifacts": (row,), "tasks": TaskSettings(seed=0, resamples=100), "pairs": (pair,), "chunk": 64}
    changed = seal(report.model_copy(update=update))
    assert decode(encode(changed), Report, "report.json") == changed


@pytest.mark.parametrize("field, value", [("tasks", None), ("pairs", []), ("chunk", None)])
def test_a_later_field_written_at_its_default_is_not_canonical(field, value):
    plain = canonical.loads(FIRST.read_bytes())
    del plain["digest"]
    plain[field] = value
    plain["digest"] = canonical.digest(plain)
    with pytest.raises(CorruptArtifactError):
        decode(canonical.dumps(plain), Report, "report.json")


def test_intervals_refuse_infinities():
    with pytest.raises(ValueError, match="finite"):
        Interval(low=0.0, high=float("inf"))
