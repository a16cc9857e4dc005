import json
import shutil

import pytest
import torch
from huggingface_hub import errors as hub
from safetensors.torch import load_file, save_file

from kvcq.errors import InputError, ResourceError, UnavailableError, UnsupportedError
from kvcq.models import load
from kvcq.models.failures import loading
from kvcq.models.load import load_model, wrap_model
from tests.tiny import save_tiny, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "tiny")


def test_a_folder_loads_in_float32_on_the_cpu_ready_to_measure(folder, capfd):
    said = []
    loaded = load_model(str(folder), device="cpu", notify=said.append)
    assert (loaded.dtype_name, loaded.device.type, loaded.source.kind) == ("float32", "cpu", "folder")
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.provenance.source == "tiny"
    assert loaded.provenance.weights[0].size == (folder / "model.safetensors").stat().st_size
    assert said == ["loading tiny"]
    assert capfd.readouterr() == ("", "")


def test_identity_does_not_depend_on_the_dtype_or_on_the_way_of_loading(folder):
    half = load_model(str(folder), device="cpu", dtype="bfloat16")
    assert half.dtype_name == "bfloat16"
    whole = load_model(str(folder), device="cpu")
    assert half.identity == whole.identity
    assert wrap_model(tiny_model(), tiny_tokenizer()).identity == whole.identity


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"device": "gpu"}, InputError, "--device"),
        ({"device": "cuda:99"}, UnavailableError, "cuda:99"),
        ({"dtype": "int8"}, InputError, "float32, bfloat16, float16"),
        ({"device": "cpu", "device_map": "auto"}, InputError, "exclude each other"),
    ],
)
def test_bad_places_and_dtypes_are_refused(folder, options, error, text):
    with pytest.raises(error, match=text):
        load_model(str(folder), **options)


def one_line(folder, error, **options):
    with pytest.raises(error) as refusal:
        load_model(str(folder), device="cpu", **options)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_a_folder_without_configuration_names_the_way_out(tmp_path):
    assert "no config.json" in one_line(tmp_path, InputError)
    (tmp_path / "adapter_config.json").touch()
    assert "merge the adapter" in one_line(tmp_path, InputError)
    (tmp_path / "model.gguf").touch()
    assert "give the .gguf file itself" in one_line(tmp_path, InputError)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model_type": 3}', "{}"])
def test_a_broken_configuration_is_one_line(copy, content):
    (copy / "config.json").write_text(content)
    one_line(copy, InputError)


def test_an_unknown_architecture_is_unsupported(copy):
    (copy / "config.json").write_text('{"model_type": "t5"}')
    one_line(copy, UnsupportedError)


def test_damaged_or_missing_weights_are_one_line(copy):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    one_line(copy, InputError)
    weights.unlink()
    one_line(copy, InputError)


def test_weights_that_the_library_would_invent_are_refused(copy):
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.self_attn.k_proj.weight" in one_line(copy, InputError)


def test_a_tokenizer_is_needed_unless_said_otherwise(copy):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    assert "tokenizer" in one_line(copy, InputError)
    loaded = load_model(str(copy), device="cpu", need_tokenizer=False)
    assert loaded.tokenizer is None
    assert loaded.identity.vocabulary == "none"


def test_code_that_comes_with_a_model_runs_only_when_trusted(copy):
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "own.py").write_text("raise SystemExit('ran')")
    assert "--trust-remote-code" in one_line(copy, UnsupportedError)


def test_an_unsupported_architecture_is_refused_at_load(tmp_path):
    assert "MLA" in one_line(save_tiny(tmp_path / "mla", "deepseek_v3"), UnsupportedError)


def response_error(kind):
    response = type("Response", (), {"headers": {}, "request": None, "status_code": 403, "url": "x"})()
    return kind("refused", response=response)


@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (response_error(hub.GatedRepoError), UnavailableError, "gated"),
        (response_error(hub.RepositoryNotFoundError), InputError, "neither a local folder nor a model on the hub"),
        (response_error(hub.RevisionNotFoundError), InputError, "revision"),
        (response_error(hub.HfHubHTTPError), UnavailableError, "refused"),
        (hub.LocalEntryNotFoundError("offline"), UnavailableError, "not reachable"),
        (ConnectionError("down"), UnavailableError, "not reachable"),
        (torch.OutOfMemoryError("CUDA out of memory"), ResourceError, "out of memory"),
        (OSError(28, "No space left on device"), ResourceError, "no space left"),
        (ImportError("needs `sentencepiece`\nmore"), UnavailableError, "sentencepiece"),
        (RuntimeError("size mismatch\nmany\nlines"), InputError, "size mismatch"),
        (ValueError(), InputError, "ValueError"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_failures_of_the_library_become_one_line(error, expected, text, wrapped):
    with pytest.raises(expected, match=text) as caught, loading("org/name"):
        if wrapped and expected is not InputError:
            raise OSError("We couldn't connect") from error
        raise error
    assert "org/name" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unreachable_hub_fails_at_once(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError

    monkeypatch.setattr(load.HfApi, "model_info", unreachable)
    with pytest.raises(UnavailableError, match="go online") as refusal:
        load_model("organisation/no-such-model-anywhere")
    assert refusal.value.exit_code == 7
