"""What the documentation says must hold: links, commands, tables, error lines, and the code that it shows."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import typer

from kvcq.artifacts.bundle import open_bundle
from kvcq.cli.main import app
from kvcq.cli.serve import OF_HF
from kvcq.codecs.clip import clip_rows
from kvcq.codecs.encoded import affine_words
from kvcq.codecs.packing import encode_pages, pack2
from kvcq.codecs.pair import HeadCodec, layer_roles
from kvcq.codecs.uniform import decode_uniform, encode_uniform
from kvcq.evaluation.gates import METRICS
from kvcq.methods import registry
from kvcq.pipeline.sglang import arguments
from kvcq.runtime.layout import page_bytes, token_bytes
from kvcq.runtime.sglang.flags import RULES, SIZES
from kvcq.spec import checkpoint, geometry, header, identity, manifest, report, scores, sweep, tasks
from kvcq.spec.codec import CodecSpec
from kvcq.spec.files import FileEntry, TensorEntry
from kvcq.spec.plan import LayerPlan, Windows
from kvcq.spec.recipe import Recipe
from tests.artifacts.example import make_chain

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *DOCS]
OWN = [ROOT / "docs" / name for name in ("format.md", "guide.md", "methods.md")]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUNNABLE = re.compile(r"^<!-- run -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE_SPAN = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(r"(?:^|[;&|]) *kvcq +([a-z][a-z-]*)([^\n;&|]*)", re.MULTILINE)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def named(path):
    return str(path.relative_to(ROOT))


def prose(path):
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path):
    """Anchors of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def code(path):
    """Everything that is written as code: spans of the prose, and blocks that are no Python."""
    text = path.read_text(encoding="utf-8")
    blocks = [body.replace("\\\n", " ") for language, body in FENCE.findall(text) if language != "python"]
    return CODE_SPAN.findall(prose(path)) + blocks


def flags():
    """Flags of each verb of the command line, ``bench serve`` for one that is a verb of another."""
    verbs = dict(typer.main.get_command(app).commands)
    for name, verb in list(verbs.items()):
        verbs |= {f"{name} {inner}": found for inner, found in getattr(verb, "commands", {}).items()}
    return {
        name: {flag for item in verb.params for flag in [*item.opts, *item.secondary_opts]} | {"--help"}
        for name, verb in verbs.items()
    }


def sglang_flags():
    """Flags of SGLang that kvcq knows of, and those that it advises to use."""
    ruled = {rule.flag for rule in (*RULES, *SIZES)}
    advised = {text.split(",")[0] for text in OF_HF.values() if text and text.startswith("--")}
    named = (*arguments.OWN, *arguments.UNPROVABLE, *arguments.SET, *arguments.MANY)
    return (
        ruled
        | advised
        | {arguments.flag(name) for name in named}
        | {"--api-key", "--enable-metrics", "--skip-server-warmup", arguments.OVERRIDES}
    )


def section(text, title):
    """The text below a heading of the second level."""
    return re.split(r"^## ", text.split(f"\n## {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def table(text, *columns):
    """Rows of the table that has these columns."""
    lines = text.splitlines()
    start = lines.index(f"| {' | '.join(columns)} |") + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append(tuple(cell.strip() for cell in line.strip("|").split("|")))
    return rows


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_resolve(page):
    for target in LINK.findall(prose(page)):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found), target


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_exist(page):
    known = flags()
    anywhere = set().union(*known.values()) | {"--version"} | sglang_flags()
    for text in code(page):
        for verb, rest in COMMAND.findall(text):
            assert verb in known, f"kvcq {verb}"
            inner = f"{verb} {''.join(rest.split()[:1])}"
            verb = inner if inner in known else verb
            for flag in FLAG.findall(rest.partition(" -- ")[0]):
                assert flag in known[verb], f"kvcq {verb} {flag}"
        if text.startswith("--"):
            assert set(FLAG.findall(text)) <= anywhere, text


@pytest.mark.parametrize("page", OWN, ids=named)
def test_lines_are_short(page):
    assert [line for line in page.read_text(encoding="utf-8").splitlines() if len(line) > 120] == []


def test_parameter_tables_equal_the_registry():
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    meanings = dict(re.findall(r"^- `(\w+)`: (.+)$", section(text, "Parameters"), re.MULTILINE))
    used = set()
    for name in registry.BUILT_IN:
        own = section(text, f"`{name}`")
        (info,) = (found for found in registry.describe() if found.name == name)
        wanted = [(f"`{p.name}`", str(p.default), p.allowed) for p in info.parameters]
        assert (table(own, "parameter", "default", "allowed") if wanted else []) == wanted, name
        assert {p.name: meanings.get(p.name) for p in info.parameters} == {p.name: p.doc for p in info.parameters}
        used |= {p.name for p in info.parameters}
    assert set(meanings) == used
    assert re.findall(r"^## `(.+)`$", text, re.MULTILINE) == list(registry.BUILT_IN)


def test_recipe_defaults_are_stated():
    text = section((ROOT / "docs" / "methods.md").read_text(encoding="utf-8"), "Parameters")
    recipe = Recipe(method="nova")
    assert f"`windows.sink` ({recipe.windows.sink})" in text
    assert f"`windows.recent` ({recipe.windows.recent})" in text
    assert {f"`{name}`" for name in set(Recipe.model_fields) - {"method", "params", "windows"}} <= set(
        re.findall(r"`\w+`", text)
    )


def test_bytes_per_token_equal_the_arithmetic():
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    columns = ("d", "groups", "K codes", "V codes", "affine", "total", "page block", "bits per element")
    rows = table(text, *columns)
    assert [int(row[0]) for row in rows if row[1] == "1"] == [64, 80, 96, 128, 256]
    for d, groups, *stated in rows:
        side, dim = CodecSpec(groups=int(groups)), int(d)
        codes, words = token_bytes(side, side, dim, dim)
        bits = f"{8 * (codes + words) / (2 * dim):.4f}"
        numbers = [codes // 2, codes // 2, words, codes + words, page_bytes(side, side, dim, dim)]
        assert stated == [*map(str, numbers), bits]


RECORDS = (
    FileEntry, TensorEntry, identity.Identity, identity.WeightFile, identity.Provenance, geometry.RopeSpec,
    geometry.LayerGeometry, geometry.ModelGeometry, header.DataSource, Recipe, Windows, LayerPlan, CodecSpec,
    header.Shard, header.StatsHeader, checkpoint.CheckpointHeader, header.FitHeader, report.AttentionMetrics,
    report.ContextReport, report.LayerReport, report.BitsEntry, report.FoldDecision, report.CanarySummary,
    report.ArtifactReport, report.GateResult, report.Report, tasks.Interval, tasks.TaskScores, tasks.PerplexityScore,
    tasks.NeedleScore, tasks.NeedleLength, tasks.NeedleCell, tasks.NeedleItem, tasks.AgreementScore,
    tasks.DecodeKLScore, tasks.TaskSettings, tasks.PerplexitySettings, tasks.NeedleSettings,
    tasks.AgreementSettings, tasks.DecodeKLSettings, tasks.PairTest, sweep.Sweep, sweep.SweepAxis,
    sweep.SweepPoint, scores.ScoresReport, scores.Sampling, scores.TaskFile, scores.ServerScores,
    scores.TaskResult, scores.JudgedAnswer,
    manifest.ValidationSummary, manifest.Manifest,
)  # fmt: skip


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_field_is_documented(record):
    named = set(CODE_SPAN.findall(prose(ROOT / "docs" / "format.md")))
    assert set(record.model_fields) - named == set()


def test_every_metric_is_explained():
    text = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    cells = " ".join(row[0] for row in table(text, "field", "column", "meaning"))
    assert set(re.findall(r"`(\w+)`", cells)) == {*METRICS, "mean_ratio"} - {"bits"}


def test_error_lines_are_those_of_the_code():
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "kvcq").rglob("*.py")))
    text = section((ROOT / "docs" / "guide.md").read_text(encoding="utf-8"), "Troubleshooting")
    lines = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert len(lines) > 40
    for line in lines:
        for part in line.split("…"):
            assert part.strip(" :") in source, line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which the bundle of the examples exists, tiny."""
    folder = tmp_path_factory.mktemp("docs")
    make_chain(folder)["bundle"].rename(folder / "smollm2-nova.kvcq")
    return folder


def run(page, folder, monkeypatch):
    """Run the marked blocks of a page in order, in one namespace; return it."""
    monkeypatch.chdir(folder)
    namespace = {}
    for number, block in enumerate(RUNNABLE.findall(page.read_text(encoding="utf-8"))):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)  # noqa: S102
    return namespace


@pytest.mark.parametrize("page", DOCS, ids=named)
def test_marked_python_of_the_docs_runs(page, folder, monkeypatch):
    run(page, folder, monkeypatch)


@pytest.fixture
def shown(folder, monkeypatch):
    """The namespace of docs/format.md after its blocks ran."""
    found = run(ROOT / "docs" / "format.md", folder, monkeypatch)
    assert {"encode_uniform", "encode_vq", "read_block"} <= set(found)
    return found


def test_numpy_reads_what_kvcq_reads(shown, folder):
    bundle = open_bundle(folder / "smollm2-nova.kvcq")
    assert shown["manifest"] == json.loads(json.dumps(bundle.manifest.plain()))
    assert shown["tensors"].keys() == bundle.tensors.keys()
    assert all(np.array_equal(array, bundle.tensors[name]) for name, array in shown["tensors"].items())


@pytest.mark.parametrize(("clip", "groups"), [(1.0, 1), (0.92, 1), (0.75, 4)])
def test_numpy_uniform_codes_are_those_of_kvcq(shown, clip, groups):
    rows = np.random.default_rng(1).standard_normal((2, 50, 64)).astype(np.float32)
    rows[0, 0] = 0.5
    codes, scale, bias, _ = encode_uniform(clip_rows(torch.from_numpy(rows), clip), groups)
    packed = pack2(codes)
    for ours, theirs in zip(shown["encode_uniform"](rows, clip, groups), (packed, scale, bias), strict=True):
        assert np.array_equal(ours, theirs.numpy())
    decoded = shown["decode_uniform"](packed.numpy(), scale.numpy(), bias.numpy())
    # A fused multiply-add may round once where numpy rounds twice.
    assert np.allclose(decoded, decode_uniform(codes, scale, bias).numpy(), rtol=1e-6, atol=1e-6)


def test_numpy_codecs_of_a_layer_are_those_of_kvcq(shown, folder):
    bundle = open_bundle(folder / "smollm2-nova.kvcq")
    layer = bundle.manifest.geometry.layers[0]
    codec = HeadCodec.build(bundle.manifest.plan[0], layer, layer_roles(bundle.tensors, 0))
    r = codec.key_frame(torch.from_numpy(shown["k"]))
    assert np.allclose(shown["r"], r.numpy(), atol=1e-5)
    encoded = codec.encode_keys(r)
    index, rho = shown["encode_vq"](r.numpy(), shown["words"])
    assert (index == encoded.codes.numpy()).mean() > 0.99
    assert np.allclose(rho.astype(np.float32), encoded.scale.float().numpy(), rtol=2e-3)
    decoded = shown["decode_vq"](encoded.codes.numpy(), encoded.scale.numpy(), shown["words"])
    assert np.allclose(decoded, codec.decode_keys(encoded).numpy(), atol=1e-6)
    queries = torch.from_numpy(shown["q"]).repeat_interleave(layer.q_heads // layer.kv_heads, 0)
    scores = codec.query(queries)[:: layer.q_heads // layer.kv_heads] @ codec.decode_keys(encoded).mT
    agreed = (index == encoded.codes.numpy()).all(-1)
    for head in range(layer.kv_heads):
        assert np.allclose(shown["scores"][head][:, agreed[head]], scores[head].numpy()[:, agreed[head]], rtol=0.01)
    values = codec.value_frame(torch.from_numpy(shown["v"]))
    back = codec.values_back(codec.decode_values(codec.encode_values(values)))
    assert np.isclose(shown["v_hat"], back.numpy(), atol=1e-3).mean() > 0.99


@pytest.mark.parametrize("groups", [1, 4])
def test_numpy_reads_a_page_block(shown, groups):
    rng = np.random.default_rng(2)
    k, v = (torch.from_numpy(rng.integers(0, 256, (1, 64, n)).astype(np.uint8)) for n in (32, 16))
    affine = torch.from_numpy(rng.standard_normal((1, 64, groups, 4)).astype(np.float16))
    block = encode_pages(k, v, affine)[0, 0].numpy()
    for ours, theirs in zip(shown["read_block"](block, 128, 64, groups), (k, v, affine), strict=True):
        assert np.array_equal(ours, theirs[0].numpy())


def test_affine_words_repeat_the_single_group(shown):
    rows = torch.from_numpy(np.random.default_rng(3).standard_normal((1, 3, 16)).astype(np.float32))
    plan = LayerPlan(layer=0, k=CodecSpec(groups=4), v=CodecSpec())
    shape = geometry.LayerGeometry(layer=0, kind="full", q_heads=1, kv_heads=1, d_k=16, d_v=16)
    codec = HeadCodec.build(plan, shape, {})
    words = affine_words(codec.encode_keys(rows), codec.encode_values(rows))
    assert words.shape == (1, 3, 4, 4)
    assert (words[..., 2:] == words[:, :, :1, 2:]).all()
