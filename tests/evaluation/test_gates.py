from pathlib import Path

import pytest

from kvcq.errors import InputError
from kvcq.evaluation import gates as module
from kvcq.evaluation.gates import apply_gates, check_gates, load_gates
from kvcq.spec.plan import Windows
from kvcq.spec.report import ArtifactReport, AttentionMetrics, ContextReport
from kvcq.spec.tasks import Interval, NeedleLength, NeedleScore, PerplexityScore, TaskScores


def metrics(kl: float) -> AttentionMetrics:
    return AttentionMetrics(**dict.fromkeys(AttentionMetrics.model_fields, 0.5) | {"kl": kl})


def artifact(name: str, kls: dict[int, float], *, reference: bool = False) -> ArtifactReport:
    return ArtifactReport(
        name=name,
        method=name,
        tensors_digest=None if reference else "0" * 64,
        windows=Windows(),
        target_context=None,
        bits={"2048": 3.5, "8192": 2.4, "131072": 2.3},
        quantized_layers=(0,),
        skipped_layers={},
        contexts=tuple(
            ContextReport(context=context, passages=1, queries=64, quantized_share=0.8, metrics=metrics(kl))
            for context, kl in kls.items()
        ),
        layers=(),
    )


ARTIFACTS = [
    artifact("bf16", {2048: 0.0, 8192: 0.0}, reference=True),
    artifact("nova", {2048: 0.01, 8192: 0.05}),
    artifact("naive", {2048: 0.2, 8192: 0.9}),
]


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "gates.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def run(tmp_path: Path, text: str):
    return apply_gates(load_gates(written(tmp_path, text)), ARTIFACTS)


def test_a_gate_applies_to_every_artifact_but_the_reference(tmp_path):
    results = run(tmp_path, "gates: [{metric: kl, context: 2048, max: 0.1}]")
    assert [(r.artifact, r.value, r.passed) for r in results] == [("nova", 0.01, True), ("naive", 0.2, False)]


def test_max_is_the_longest_context_and_names_choose_artifacts(tmp_path):
    results = run(tmp_path, "gates: [{metric: kl, max: 1e-1, artifacts: [bf16, naive]}]")
    assert [(r.artifact, r.context, r.passed) for r in results] == [("bf16", 8192, True), ("naive", 8192, False)]


def test_lower_limits_and_the_metrics_beside_attention(tmp_path):
    text = """
    gates:
      - {metric: top1, context: 2048, min: 0.5, artifacts: [nova]}
      - {metric: quantized_share, context: max, min: 0.9, artifacts: [nova]}
      - {metric: bits, context: max, max: 2.5, artifacts: [nova]}
    """
    results = run(tmp_path, text)
    assert [(r.direction, r.context, r.passed) for r in results] == [
        ("min", 2048, True),
        ("min", 8192, False),
        ("max", 8192, True),
    ]


def test_the_example_in_the_docstring_is_a_gates_file(tmp_path):
    example = module.__doc__.split("::\n")[1].split("`context` is")[0]
    assert len(load_gates(written(tmp_path, example))) == 7


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{metric: output_eror, max: 1}", "did you mean output_error"),
        ("{metric: zzzz, max: 1}", "known: k_error"),
        ("{metric: kl}", "exactly one"),
        ("{metric: kl, max: 1, min: 0}", "exactly one"),
        ("{metric: kl, max: true}", "max: must be a number"),
        ("{metric: kl, max: .nan}", "finite"),
        ("{metric: kl, max: high}", "max: "),
        ("{metric: kl, max: 1, context: longest}", "context: must be a length in tokens or max"),
        ("{metric: kl, max: 1, context: true}", "context"),
        ("{metric: kl, max: 1, context: -4}", "context"),
        ("{metric: kl, max: 1, artifacts: []}", "empty list"),
        ("{metric: kl, max: 1, artefacts: [a]}", "artefacts: Extra inputs"),
        ("kl", "gate 2"),
    ],
)
def test_a_gate_that_is_not_understood_is_named(tmp_path, entry, message):
    path = written(tmp_path, f"gates: [{{metric: kl, max: 1}}, {entry}]")
    with pytest.raises(InputError, match=message) as error:
        load_gates(path)
    assert "gate 2" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "gates: []",
        "gates: {}",
        "gates: [{metric: kl, max: 1}]\nmore: 1",
        "gates: [",
        "gates: !!python/object/apply:os.getcwd []",
        "[" * 5000,
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, text):
    with pytest.raises(InputError, match="gates") as error:
        load_gates(written(tmp_path, text))
    assert "\n" not in str(error.value)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(InputError, match=r"absent.yaml"):
        load_gates(tmp_path / "absent.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not YAML"):
        load_gates(binary)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{metric: kl, max: 1, context: 4096}", "measured: 2048, 8192"),
        ("{metric: bits, max: 1, context: 4096}", "measured: 2048, 8192, 131072"),
        ("{metric: kl, max: 1, artifacts: [novva]}", "novva.*artifacts of this run: bf16, nova, naive"),
    ],
)
def test_gates_on_what_was_not_measured_are_refused(tmp_path, entry, message):
    with pytest.raises(InputError, match=message):
        run(tmp_path, f"gates: [{entry}]")


def test_an_artifact_without_contexts_fails_its_gates_loudly(tmp_path):
    gates = load_gates(written(tmp_path, "gates: [{metric: kl, max: 1}]"))
    with pytest.raises(InputError, match="measured: none"):
        apply_gates(gates, [artifact("nova", {})])


def scored(name: str, ratio: float) -> ArtifactReport:
    interval = Interval(low=0.0, high=1.0)
    perplexity = tuple(
        PerplexityScore(
            context=context,
            passages=1,
            tokens=10,
            nll=1.0,
            perplexity=20.0 * ratio,
            interval=interval,
            ratio=ratio,
            ratio_interval=interval,
            block_nll=(1.0,),
            block_tokens=(10,),
        )
        for context in (2048, 4096)
    )
    length = NeedleLength(context=8192, items=4, score=0.5, interval=interval, exact=0.25)
    needle = NeedleScore(
        score=0.5, interval=interval, exact=0.25, truncated=0, errors=0, lengths=(length,), cells=(), items=()
    )
    tasks = TaskScores(cache="packed", perplexity=perplexity, needle=needle)
    return artifact(name, {}).model_copy(update={"tasks": tasks})


def test_metrics_of_tasks_are_gated_at_the_contexts_of_their_own_task(tmp_path):
    text = """gates:
      - {metric: perplexity_ratio, context: max, max: 1.03}
      - {metric: perplexity, context: 2048, max: 21}
      - {metric: needle, min: 0.6}
      - {metric: needle_exact, min: 0.2}
      - {metric: bits, max: 2.5}"""
    found = apply_gates(load_gates(written(tmp_path, text)), [scored("nova", 1.01)])
    assert [(r.metric, r.context, r.passed) for r in found] == [
        ("perplexity_ratio", 4096, True),
        ("perplexity", 2048, True),
        ("needle", 8192, False),
        ("needle_exact", 8192, True),
        ("bits", 8192, True),
    ]


def test_a_gate_on_a_task_that_did_not_run_is_refused_before_and_after(tmp_path):
    gates = load_gates(written(tmp_path, "gates: [{metric: agreement, min: 0.9}]"))
    with pytest.raises(InputError, match=r"needs the task agreement.*--tasks attention,agreement"):
        check_gates(gates, ["nova"], {"attention": (2048,)})
    with pytest.raises(InputError, match="nova was not measured at"):
        apply_gates(gates, [scored("nova", 1.0)])
    check_gates(gates, ["nova"], {"agreement": (2048,)})


def test_a_gate_at_a_context_that_its_task_will_not_measure_is_refused_before(tmp_path):
    gates = load_gates(written(tmp_path, "gates: [{metric: needle, context: 2048, min: 0.9}]"))
    with pytest.raises(InputError, match=r"needs context 2048.*measured: 4096"):
        check_gates(gates, ["nova"], {"attention": (2048,), "needle": (4096,)})
