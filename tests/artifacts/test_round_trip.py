import json

import numpy as np
import pytest
import torch

from kvcq.artifacts.bundle import draft_manifest, open_bundle, write_bundle
from kvcq.artifacts.diff import diff
from kvcq.artifacts.fit_file import read_fit, write_fit
from kvcq.artifacts.report_file import read_report, write_report
from kvcq.artifacts.stats_file import read_stats
from kvcq.artifacts.verify import Intact, detect, read_any, verify
from kvcq.errors import CorruptArtifactError, InputError, MismatchError
from kvcq.spec import canonical
from tests.artifacts import example


def content(path):
    return {file.name: file.read_bytes() for file in path.iterdir()} if path.is_dir() else path.read_bytes()


def test_writing_twice_gives_the_same_bytes(chain, tmp_path):
    again = example.make_chain(tmp_path)
    for kind, path in chain.items():
        assert content(path) == content(again[kind])


def test_every_kind_is_detected_and_verifies(chain):
    for kind, path in chain.items():
        wanted = "bundle" if kind == "archive" else kind
        assert detect(path) == wanted
        outcome = verify(path)
        assert isinstance(outcome, Intact)
        assert (outcome.kind, outcome.archive) == (wanted, kind == "archive")
        assert outcome.size == sum(map(len, content(path).values())) if path.is_dir() else outcome.size > 0


def test_statistics_come_back_with_their_dtypes(chain):
    stats = read_stats(chain["stats"])
    assert stats.moments["layers.0.k_moment.hi"].dtype == np.int64
    rows = stats.samples["layers.0.rows.k"]
    assert rows.dtype == torch.bfloat16 and rows.shape == (2, 8, 16)
    assert torch.equal(stats.samples["probe.0.layers.1.k"], torch.ones(2, 3, 16, dtype=torch.float16))
    plain = json.loads((chain["stats"] / "stats.json").read_bytes())
    assert stats.digest == canonical.digest({key: plain[key] for key in plain if key != "digest"})


def test_bundle_folder_and_archive_hold_the_same(chain):
    folder, archive = open_bundle(chain["bundle"]), open_bundle(chain["archive"])
    assert folder.manifest == archive.manifest and folder.card == archive.card == "# tiny\n"
    assert not folder.archive and archive.archive
    for name, array in example.tensors().items():
        assert np.array_equal(folder.tensors[name], array) and np.array_equal(archive.tensors[name], array)
    for name, array in example.canary_arrays().items():
        assert np.array_equal(archive.canary[name], array)
    assert set(folder.tensors) == set(example.tensors())


def test_report_names_the_tensors_and_run_facts_stay_out_of_it(chain):
    measured = read_report(chain["report"])
    assert measured.run == {"seconds": 1.5} and measured.page == "<p>ok</p>"
    assert "seconds" not in (chain["report"] / "report.json").read_text()
    assert measured.report.artifacts[0].tensors_digest == read_fit(chain["fit"]).header.tensors_digest


def test_diff_names_changed_fields_and_tensors(chain, tmp_path):
    assert diff(chain["bundle"], chain["archive"]) == []
    values = example.tensors()
    values["layers.0.k.offset"] = values["layers.0.k.offset"] + np.float32(0.5)
    header = example.fit_header().model_copy(update={"target_context": 128})
    write_fit(tmp_path / "other", header, values)
    found = {entry.field: entry for entry in diff(chain["fit"], tmp_path / "other")}
    assert (found["target_context"].left, found["target_context"].right) == (64, 128)
    assert found["layers.0.k.offset"].error == pytest.approx(0.5, rel=1e-6)
    assert set(found) == {"target_context", "layers.0.k.offset"}


def test_diff_of_two_kinds_compares_what_both_have(chain):
    assert diff(chain["fit"], chain["bundle"]) == []
    assert all(entry.left is None or entry.right is None for entry in diff(chain["stats"], chain["report"])[-3:])


def test_pack_refuses_a_report_of_other_tensors(chain, tmp_path):
    measured = read_report(chain["report"])
    example.make_fit(tmp_path / "fit", seed=5)
    other = read_fit(tmp_path / "fit")
    with pytest.raises(MismatchError, match="does not cover"):
        draft_manifest(other, measured)
    with pytest.raises(MismatchError, match="does not cover"):
        write_bundle(
            tmp_path / "b",
            open_bundle(chain["bundle"]).manifest.model_copy(update={"tensors_digest": other.header.tensors_digest}),
            other,
            measured,
            "",
        )
    foreign = measured.report.identity.model_copy(update={"vocabulary": "1" * 64})
    with pytest.raises(MismatchError, match="different models"):
        draft_manifest(read_fit(chain["fit"]), _with(measured, identity=foreign))
    row = measured.report.artifacts[0].model_copy(update={"canary": None})
    with pytest.raises(InputError, match="no canary"):
        draft_manifest(read_fit(chain["fit"]), _with(measured, artifacts=(row,)))


def _with(measured, **changes):
    return type(measured)(**{**vars(measured), "report": measured.report.model_copy(update=changes)})


def test_a_fit_that_does_not_fit_its_plan_is_never_written(tmp_path):
    values = example.tensors()
    values["layers.1.k.transform"] = values["layers.1.k.transform"] * np.nan
    with pytest.raises(InputError, match=r"layers\.1\.k\.transform has values that are not finite"):
        write_fit(tmp_path / "fit", example.fit_header(), values)
    assert list(tmp_path.iterdir()) == []


def test_a_report_whose_canaries_differ_from_its_rows_is_never_written(tmp_path):
    header = example.fit_header().model_copy(update={"tensors_digest": example.ZERO})
    with pytest.raises(InputError, match="canaries"):
        write_report(tmp_path / "report", example.report(header), "", {}, {})
    twin = example.report(header)
    twin = twin.model_copy(update={"artifacts": twin.artifacts * 2})
    with pytest.raises(InputError, match="same name"):
        write_report(tmp_path / "report", twin, "", {"canary-0.safetensors": example.canary_arrays()}, {})
    assert list(tmp_path.iterdir()) == []


def test_other_paths_are_input_errors(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        verify(tmp_path / "absent")
    with pytest.raises(InputError, match="not a kvcq artifact"):
        verify(tmp_path)


def test_tensors_without_their_header_are_an_incomplete_fit(chain, tmp_path):
    (tmp_path / "tensors.safetensors").write_bytes(b"")
    with pytest.raises(CorruptArtifactError, match=r"incomplete fit: fit\.json is missing"):
        verify(tmp_path)
    assert type(read_any(chain["fit"])).__name__ == "FitArtifact"
