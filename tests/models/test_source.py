import pytest

from kvcq.errors import InputError
from kvcq.models.source import ModelSource, resolve_source


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B"])
def test_hub_ids_are_hub_models_with_their_revision(name):
    assert resolve_source(name, "main") == ModelSource("hub", name, "main")
    assert resolve_source(name).label == name


def test_a_builtin_name_wins():
    assert resolve_source("smollm2-135m").kind == "builtin"


def test_an_existing_folder_or_gguf_is_local_and_labelled_without_its_path(tmp_path, monkeypatch):
    folder = tmp_path / "some-model"
    folder.mkdir()
    weights = tmp_path / "Weights.GGUF"
    weights.touch()
    assert resolve_source(str(folder)).kind == "folder"
    assert resolve_source(str(weights)).kind == "gguf"
    monkeypatch.chdir(tmp_path)
    assert resolve_source("some-model").label == "some-model"
    monkeypatch.chdir(folder)
    assert resolve_source(".").label == "some-model"


@pytest.mark.parametrize(
    "name", ["./x", "/no/such", "~/none", "a/b/c", "x.gguf", "x/", "c:\\x", "a b", "-x", "", " ", "a//b"]
)
def test_what_cannot_be_a_model_is_refused_with_its_name(name):
    with pytest.raises(InputError) as refusal:
        resolve_source(name)
    assert name.strip() in str(refusal.value)


def test_an_ordinary_file_is_refused(tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(InputError, match="not this file"):
        resolve_source(str(tmp_path / "model.bin"))


def test_a_revision_needs_a_hub_model(tmp_path):
    for name in (str(tmp_path), "smollm2-135m"):
        with pytest.raises(InputError, match="--revision"):
            resolve_source(name, "main")
