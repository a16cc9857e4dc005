"""quickstart on a tiny model: every file of the chain, and a refusal when the methods come out in a wrong order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvcq.errors import EvaluationError, InputError
from kvcq.pipeline import quickstart as module
from kvcq.pipeline.inspect import verify
from kvcq.pipeline.quickstart import METHODS, QuickstartResult, check_order, quickstart
from kvcq.pipeline.requests import QuickstartRequest
from tests.pipeline.test_fit_options import Listener
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[QuickstartResult, Listener]:
    folder = tmp_path_factory.mktemp("quick")
    model = save_tiny(folder / "tiny", num_hidden_layers=2, max_position_embeddings=2048)
    patch, listener = pytest.MonkeyPatch(), Listener()
    patch.setattr(module, "ROWS", 512)
    patch.setattr(module, "ITERATIONS", 1)
    try:
        return quickstart(QuickstartRequest(model=str(model), out=folder / "out"), listener), listener
    finally:
        patch.undo()


def test_every_artifact_of_the_chain_verifies(made: tuple[QuickstartResult, Listener]) -> None:
    out = made[0].bundle.parent
    assert made[0].bundle.name == "tiny-nova.kvcq"
    for path in (out / "stats", *(out / "fits" / name for name in METHODS), out / "report", made[0].bundle):
        assert verify(path).record["ok"]
    assert made[0].digest == verify(made[0].bundle).record["digest"]


def test_text_and_payload_tell_the_same(made: tuple[QuickstartResult, Listener]) -> None:
    text, payload = made[0].text(), made[0].payload()
    assert str(made[0].bundle) in text and "builtin:stdlib" in text and "iterations" in text
    assert set(payload["seconds"]) == {"collect", "fit", "validate", "pack", "verify"}
    assert set(payload["kl"]) == {"bf16 reference", *METHODS}


def test_an_existing_folder_is_kept_and_forced(made: tuple[QuickstartResult, Listener], tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="output exists"):
        quickstart(QuickstartRequest(out=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_wrong_order_is_an_evaluation_error(made: tuple[QuickstartResult, Listener]) -> None:
    rows = {row.name: row for row in made[0].validated.report.artifacts}
    values = {name: 1.0 - number / 10 for number, name in enumerate(METHODS)}

    def result(kl: dict[str, float]) -> QuickstartResult:
        artifacts = []
        for name, value in kl.items():
            context = rows[name].contexts[-1]
            changed = context.model_copy(update={"metrics": context.metrics.model_copy(update={"kl": value})})
            artifacts.append(rows[name].model_copy(update={"contexts": (changed,)}))
        report = made[0].validated.report.model_copy(update={"artifacts": tuple(artifacts)})
        return replace(made[0], validated=replace(made[0].validated, report=report))

    check_order(result(values))
    with pytest.raises(EvaluationError, match="nova has KL"):
        check_order(result(values | {"nova": 0.75}))
