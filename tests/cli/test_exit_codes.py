"""Every mistake is one line on stderr, nothing on stdout, and the documented exit code."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcq.artifacts.store import Staging
from kvcq.cli.main import execute
from kvcq.errors import Interrupted
from kvcq.methods import registry
from kvcq.pipeline import collect as collect_module
from tests.attacks.hostile import edit_header
from tests.chain import World
from tests.tiny import save_tiny

Run = Callable[..., tuple[int, str, str]]
VERBS = (
    *("quickstart", "collect", "merge", "fit", "validate", "pack"),
    *("inspect", "verify", "diff", "methods", "bench", "env"),
)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = execute([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def refused(run: Run) -> Callable[..., str]:
    """Run a command line that must fail, and return its one line."""

    def call(code: int, *arguments: object) -> str:
        found, out, err = run(*arguments)
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert (found, out, len(errors)) == (code, "", 1), (found, out, err)
        assert err.splitlines()[-1] == errors[0] and "Traceback" not in err and "\x1b" not in err
        return errors[0]

    return call


def collecting(world: World, out: Path, *more: object, data: object = None) -> tuple[object, ...]:
    words = ("collect", world.model, "--data", data or world.text, "--out", out, "--rows", 256)
    return (*words, "--seq-len", 128, "--num-tokens", "1k", "-q", *more)


def validating(world: World, out: Path, *more: object, fit: object = None) -> tuple[object, ...]:
    words = ("validate", fit or world.fits["nova"], "--model", world.model, "--data", world.held_out, "--out", out)
    return (*words, "--contexts", "96", "--no-canary", "-q", *more)


def test_every_step_ends_with_0_and_one_json_object(world: World, tmp_path: Path, run: Run) -> None:
    stats, fit, report, bundle = (tmp_path / name for name in ("stats", "fit", "report", "it.kvcq"))
    small = ("--set", "windows.sink=4", "--set", "windows.recent=8")
    steps = [
        collecting(world, stats),
        ("fit", stats, "--method", "oscar", *small, "--out", fit),
        ("validate", fit, "--model", world.model, "--data", world.held_out, "--contexts", "96,160", "--out", report),
        ("pack", fit, "--report", report, "--out", bundle),
        ("inspect", bundle),
        ("verify", bundle),
        ("diff", fit, world.fits["oscar"]),
        ("methods",),
        ("env",),
    ]
    for step in steps:
        code, out, err = run(*step, "--json")
        assert code == 0, err
        assert out.endswith("}\n") and out.count("\n") == 1, step
        assert isinstance(json.loads(out), dict)
        assert "{" not in err


def test_reading_verbs_answer_in_words(world: World, run: Run) -> None:
    code, out, err = run("verify", world.folder / "nova.kvcq")
    assert code == 0 and out.startswith("verified") and not err
    code, out, _ = run("inspect", world.stats)
    assert code == 0 and "calibration.txt" in out
    code, out, _ = run("diff", world.fits["oscar"], world.fits["oscar"])
    assert (code, out) == (0, "no difference\n")
    code, out, _ = run("diff", world.fits["oscar"], world.fits["nova"])
    assert code == 0 and "oscar -> nova" in out
    code, out, _ = run("methods")
    assert code == 0 and all(f"\n{name}\n" in "\n" + out for name in registry.available())
    sections = dict(block.split("\n", 1) for block in out.strip().split("\n\n"))
    assert "\n  served\n" in sections["nova"]
    assert "\n  accuracy only: codes groups of tokens\n" in sections["kivi"]
    code, out, _ = run("--version")
    assert code == 0 and out.startswith("kvcq ")


def test_no_arguments_show_the_help(run: Run) -> None:
    code, out, err = run()
    assert code == 0 and out.startswith("Usage: kvcq") and "quickstart" in out and not err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(run: Run, verb: str) -> None:
    code, out, err = run(verb, "--help")
    assert code == 0 and f"Example: kvcq {verb}" in " ".join(out.split()) and not err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("colect",), "collect"),
        (("fit",), "stats"),
        (("fit", "x", "--methd", "nova"), "--method"),
        (("fit", "x", "--json", "--what"), "--what"),
        (("collect", "m", "--data", "x", "--seq-len", "4x"), "--seq-len"),
        (("collect", "m", "--data", "x", "--seq-len", "-1"), "--seq-len"),
        (("collect", "m", "--data", "x", "--seq-len", "0"), "--seq-len"),
        (("collect", "m", "--data", "x", "--rows", "3"), "--rows"),
        (("collect", "m", "--data", "x", "--rows", "many"), "--rows"),
        (("collect", "m"), "--data"),
        (("validate", "f", "--model", "m", "--data", "x", "--contexts", "2k,"), "--contexts"),
        (("validate", "--model", "m", "--data", "x"), "artifacts"),
        (("verify", "a", "b"), "b"),
    ],
)
def test_bad_flags_end_with_2(refused: Callable[..., str], arguments: tuple[str, ...], says: str) -> None:
    assert says.lower() in refused(2, *arguments).lower()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("--method", "nvoa"), "did you mean 'nova'"),
        (("--method", "nova", "--set", "iteration=3"), "did you mean 'iterations'"),
        (("--method", "nova", "--set", "windows.snk=3"), "did you mean 'sink'"),
        (("--method", "nova", "--set", "iterations=-3"), "iterations=-3 is not allowed"),
        ((), "no method given"),
    ],
)
def test_unknown_names_get_a_suggestion(
    world: World, tmp_path: Path, refused: Callable[..., str], settings: tuple[str, ...], says: str
) -> None:
    assert says in refused(2, "fit", world.stats, "--out", tmp_path / "fit", "-q", *settings)
    assert not list(tmp_path.iterdir())


def test_unknown_recipe_fields_get_a_suggestion(world: World, tmp_path: Path, refused: Callable[..., str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("method: nova\nskip_layer: [1]\n")
    line = refused(2, "fit", world.stats, "--recipe", recipe, "--out", tmp_path / "fit")
    assert "did you mean 'skip_layers'" in line and str(recipe) in line
    recipe.write_text("method: [nova\n")
    assert "not YAML" in refused(2, "fit", world.stats, "--recipe", recipe, "--out", tmp_path / "fit")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.txt", None, "no such file"),
        ("folder.txt", "folder", "a folder is not a text"),
        ("empty.txt", b"", "no text in it"),
        ("blank.jsonl", b"\n\n", "no text in it"),
        ("binary.txt", b"\x00\x01\x02", "binary"),
        ("latin.txt", "café".encode("latin-1"), "not UTF-8 at byte 3"),
        ("rows.jsonl", b'{"text": "a"}\n{"text": ', "rows.jsonl:2"),
        ("rows.jsonl", b'{"body": "a"}\n', "--text-column"),
        ("rows.jsonl", b'{"messages": [{"role": "user", "content": "hi"}]}\n', "chat template"),
        ("rows.jsonl", b"[1]\n", "not an object"),
        ("data.csv", b"a,b", "unknown format"),
        ("few.txt", b"the sand and the stone" * 9, "too few"),
    ],
)
def test_bad_text_ends_with_2(
    world: World, tmp_path: Path, refused: Callable[..., str], name: str, content: bytes | str | None, says: str
) -> None:
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    line = refused(2, *collecting(world, tmp_path / "stats", data=path))
    assert says in line and not (tmp_path / "stats").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--template", "chta"), "--template"),
        (("--template", "chat"), "chat template"),
        (("--packing", "of"), "--packing"),
        (("--chat-template", "none.jinja"), "--chat-template"),
        (("--seq-len", "1k"), "512 tokens"),
        (("--device", "tpu9"), "--device"),
        (("--dtype", "int3"), "--dtype"),
        (("--data", "builtin:nothing"), "builtin:nothing"),
        (("--data", "second.txt"), "second.txt"),
    ],
)
def test_bad_collect_flags_end_with_2(
    world: World, tmp_path: Path, refused: Callable[..., str], more: tuple[str, ...], says: str
) -> None:
    assert says in refused(2, *collecting(world, tmp_path / "stats", *more))
    assert not list(tmp_path.iterdir())


def test_bad_models_end_with_2(world: World, tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "empty").mkdir()
    for model in ("./nowhere/model", tmp_path / "empty", world.text, tmp_path / "no.gguf"):
        line = refused(2, "collect", model, "--data", world.text, "--out", tmp_path / "stats", "-q")
        assert str(model) in line or Path(model).name in line


def test_contexts_that_cannot_be_measured_end_with_2(world: World, tmp_path: Path, refused: Callable[..., str]) -> None:
    assert "nothing was quantized" in refused(2, *validating(world, tmp_path / "r", "--contexts", "64"))
    assert "512 tokens" in refused(2, *validating(world, tmp_path / "r", "--contexts", "4k"))
    assert "--passages" in refused(2, *validating(world, tmp_path / "r", "--contexts", "512", "--passages", 99))
    assert "neither a fit nor a bundle" in refused(2, *validating(world, tmp_path / "r", fit=world.stats))
    assert not list(tmp_path.iterdir())


def test_existing_outputs_end_with_2_and_stay(world: World, tmp_path: Path, refused: Callable[..., str]) -> None:
    keep = tmp_path / "keep.kvcq"
    keep.mkdir()
    (keep / "note").write_text("mine")
    for words in (
        collecting(world, keep),
        ("fit", world.stats, "--method", "naive-int2", "--out", keep),
        validating(world, keep),
        ("pack", world.fits["nova"], "--report", world.report, "--out", keep),
        ("quickstart", "--out", keep),
    ):
        line = refused(2, *words)
        assert "exists" in line and "--force" in line and str(keep) in line
    assert (keep / "note").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="permissions do not bind this user")
def test_a_read_only_folder_ends_with_2(world: World, tmp_path: Path, refused: Callable[..., str]) -> None:
    tmp_path.chmod(0o500)
    try:
        line = refused(2, "fit", world.stats, "--method", "naive-int2", "--out", tmp_path / "fit")
    finally:
        tmp_path.chmod(0o700)
    assert "ermission" in line


def test_a_file_in_place_of_a_folder_ends_with_2(world: World, tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "file").write_text("x")
    words = ("fit", world.stats, "--method", "naive-int2", "--out", tmp_path / "file" / "fit")
    assert "file" in refused(2, *words)


def test_failed_gates_end_with_3_after_the_report(world: World, tmp_path: Path, run: Run) -> None:
    (tmp_path / "gates.yaml").write_text("gates: [{metric: kl, max: 0.0}]")
    code, out, err = run(*validating(world, tmp_path / "r", "--gates", tmp_path / "gates.yaml", "--json"))
    assert code == 3 and err.startswith("error: 1 of 1 gates failed (nova: kl") and err.count("\n") == 1
    assert json.loads(out)["report"]["gates"][0]["passed"] is False
    assert (tmp_path / "r" / "report.json").exists()


def test_damaged_artifacts_end_with_4(world: World, tmp_path: Path, refused: Callable[..., str]) -> None:
    stats = shutil.copytree(world.stats, tmp_path / "stats")
    data = (stats / "samples.safetensors").read_bytes()
    (stats / "samples.safetensors").write_bytes(data[:-1])
    for verb in ("verify", "inspect"):
        assert str(stats) in refused(4, verb, stats)
    assert "samples.safetensors" in refused(4, "fit", stats, "--method", "oscar", "--out", tmp_path / "fit", "-q")
    bundle = shutil.copytree(world.folder / "nova.kvcq", tmp_path / "it.kvcq")
    (bundle / "kvcq.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    refused(4, *validating(world, tmp_path / "r", fit=bundle))
    (tmp_path / "an.kvcq").write_bytes(b"kvcq.json\0 and nothing")
    refused(4, "verify", tmp_path / "an.kvcq")


@pytest.mark.parametrize("verb", ["verify", "inspect"])
def test_what_is_no_artifact_ends_with_2(tmp_path: Path, refused: Callable[..., str], verb: str) -> None:
    assert "not a kvcq artifact" in refused(2, verb, tmp_path)
    assert "none" in refused(2, verb, tmp_path / "none")


def test_things_that_do_not_fit_end_with_5(world: World, tmp_path: Path, refused: Callable[..., str], run: Run) -> None:
    other = save_tiny(tmp_path / "other", head_dim=16)
    assert "another model" in refused(5, *validating(world, tmp_path / "r", "--model", other))
    run("fit", world.stats, "--method", "naive-int2", "--set", "groups=4", "--out", tmp_path / "fit")
    words = ("pack", tmp_path / "fit", "--report", world.report, "--out", tmp_path / "it.kvcq", "-q")
    assert "does not cover" in refused(5, *words)
    newer = shutil.copytree(world.fits["oscar"], tmp_path / "newer")
    edit_header(newer, "fit", lambda header: header.update(version=999))
    assert "999" in refused(5, "verify", newer)


def test_a_full_disk_ends_with_6(
    world: World, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect_module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    assert "--rows" in refused(6, *collecting(world, tmp_path / "stats"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Staging, "stream", full)
    words = ("fit", world.stats, "--method", "oscar", "--out", tmp_path / "fit", "-q")
    assert "No space left" in refused(6, *words)
    assert not list(tmp_path.iterdir())


def test_out_of_memory_ends_with_6(
    world: World, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(collect_module, "run", exhausted)
    assert "--seq-len" in refused(6, *collecting(world, tmp_path / "stats"))


def test_an_allocation_that_torch_cannot_make_ends_with_6(
    world: World, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(collect_module, "run", lambda *_, **__: torch.empty(1 << 50, dtype=torch.uint8))
    assert "memory" in refused(6, *collecting(world, tmp_path / "stats"))


def test_what_is_not_reachable_ends_with_7(
    world: World, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    assert "kvcq[data]" in refused(7, *collecting(world, tmp_path / "stats", data="hf:org/name"))
    assert "cuda" in refused(7, *collecting(world, tmp_path / "stats", "--device", "cuda:7"))


def test_kernels_are_timed_on_a_gpu_only(
    tmp_path: Path, refused: Callable[..., str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = tmp_path / "kernels.json"
    assert "CUDA" in refused(7, "bench", "kernels", "--out", out)
    assert "pages" in refused(2, "bench", "pages")
    assert "--shapes" in refused(2, "bench", "kernels", "--shapes", "32", "--dry-run")
    code, plan, _ = run("bench", "kernels", "--shapes", "1x8k,2x4k@64", "--ops", "decode", "--dry-run", "--json")
    assert code == 0 and len(json.loads(plan)["plan"]) == 2 and not out.exists()


def test_unexpected_failures_end_with_1_and_debug_shows_the_traceback(
    world: World, tmp_path: Path, refused: Callable[..., str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(collect_module, "run", broken)
    line = refused(1, *collecting(world, tmp_path / "stats"))
    assert "unexpected RuntimeError: first line second line" in line and "--debug" in line
    code, out, err = run(*collecting(world, tmp_path / "stats", "--debug"))
    assert code == 1 and not out and "Traceback" in err and err.splitlines()[-1].startswith("error: ")


def test_paths_of_200_characters_stay_on_one_line(tmp_path: Path, refused: Callable[..., str]) -> None:
    long = tmp_path / ("x" * 100) / ("y" * 100) / "stats"
    for words in (("verify", long), ("fit", long, "--method", "oscar", "--out", tmp_path / "fit", "-q")):
        assert str(long) in refused(2, *words)
    line = refused(2, "fit", "x", "--recipe", long, "--out", tmp_path / "fit")
    assert line.count(str(long)) == 1


def test_interruptions_end_with_130_and_143(
    world: World, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, code in ((KeyboardInterrupt(), 130), (Interrupted(2), 130), (Interrupted(15), 143)):

        def stop(*_: object, error: BaseException = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(collect_module, "run", stop)
        assert "run the same command again" in refused(code, *collecting(world, tmp_path / "stats"))
    assert not list(tmp_path.iterdir())


def test_text_on_stdin_is_a_source(world: World, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = world.text.open("rb")

    monkeypatch.setattr("sys.stdin", Stdin)
    code, out, err = run(*collecting(world, tmp_path / "stats", "--json", data="-"))
    assert code == 0, err
    assert json.loads(out)["tokens"] == 768
