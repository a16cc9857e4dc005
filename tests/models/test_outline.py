from __future__ import annotations

import json

import pytest

from kvcq.errors import InputError, MismatchError, UnsupportedError
from kvcq.models.load import load_model
from kvcq.models.outline import load_outline
from kvcq.runtime.compat import Sealed, check_model
from tests.tiny import save_tiny

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A saved llama and what loading it finds."""
    folder = save_tiny(tmp_path_factory.mktemp("outline") / "llama")
    return folder, load_model(str(folder))


def sealed(loaded):
    return Sealed("a.kvcq", loaded.identity, loaded.provenance, loaded.geometry)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe", "stablelm", "granite", "gemma2", "gpt_oss"])
def test_an_outline_has_the_identity_of_the_loaded_model(kind, tmp_path):
    folder = save_tiny(tmp_path / kind, kind)
    loaded = load_model(str(folder))
    outline = load_outline(str(folder), loaded.geometry)
    assert outline.identity == loaded.identity
    assert outline.provenance == loaded.provenance
    assert outline.geometry == loaded.geometry
    assert outline.weight_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert outline.config["model_type"] == loaded.geometry.model_type
    assert check_model(sealed(loaded), outline, strict=True) == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 3),
        ("num_hidden_layers", 5),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("head_dim", 16),
        ("hidden_size", 128),
        ("vocab_size", 256),
        ("max_position_embeddings", 1024),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 500000.0}),
        ("rope_parameters", YARN),
        ("rms_norm_eps", 0.5),
        ("attention_bias", True),
        ("model_type", "mistral"),
    ],
)
def test_another_configuration_is_another_model(llama, tmp_path, field, value):
    folder, loaded = llama
    other = tmp_path / "other"
    other.mkdir()
    for path in folder.iterdir():
        (other / path.name).symlink_to(path)
    plain = json.loads((folder / "config.json").read_text())
    (other / "config.json").unlink()
    (other / "config.json").write_text(json.dumps(plain | {field: value}))
    with pytest.raises(MismatchError, match="fitted for another model"):
        check_model(sealed(loaded), load_outline(str(other), loaded.geometry), strict=False)


def test_what_a_server_overrides_counts(llama):
    folder, loaded = llama
    same = load_outline(str(folder), loaded.geometry, overrides={"kvcq": {"bundle": "/x"}})
    assert check_model(sealed(loaded), same, strict=True) == ()
    other = load_outline(str(folder), loaded.geometry, overrides={"rope_parameters": YARN})
    with pytest.raises(MismatchError, match="geometry differ"):
        check_model(sealed(loaded), other, strict=False)


def test_other_weights_are_told_without_reading_them_all(llama, tmp_path):
    folder, loaded = llama
    other = save_tiny(tmp_path / "llama", seed=1)
    outline = load_outline(str(other), loaded.geometry)
    assert check_model(sealed(loaded), outline, strict=False) == ("fitted on other weights (llama, not llama)",)
    with pytest.raises(MismatchError, match="other weights"):
        check_model(sealed(loaded), outline, strict=True)
    assert folder != other


def test_a_folder_without_a_tokenizer_or_of_a_refused_type_is_refused(llama, tmp_path):
    folder, loaded = llama
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(InputError, match="no readable tokenizer"):
        load_outline(str(bare), loaded.geometry)
    latent = json.loads((folder / "config.json").read_text()) | {"kv_lora_rank": 16}
    (bare / "config.json").write_text(json.dumps(latent))
    with pytest.raises(UnsupportedError, match="MLA"):
        load_outline(str(bare), loaded.geometry)
    with pytest.raises(InputError, match="no such model"):
        load_outline(str(tmp_path / "nowhere"), loaded.geometry)
