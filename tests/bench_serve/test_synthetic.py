"""Bundles and model folders made of nothing: valid, of the right geometry, and not to be taken for real ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvcq.artifacts.bundle import Bundle, open_bundle
from kvcq.artifacts.verify import read_any
from kvcq.codecs.pair import HeadCodec
from kvcq.errors import InputError
from kvcq.kernels.arrays import Tables
from kvcq.models.geometry import plan_geometry
from kvcq.models.outline import load_outline
from kvcq.models.rope import rope_specs
from kvcq.models.weightless import (
    SHAPES,
    byte_characters,
    config_geometry,
    shape_config,
    step_weights,
    write_model,
)
from kvcq.pipeline.bench_serve.synthetic import KINDS, rotations, write_synthetic
from kvcq.runtime.codecs import served_codecs
from kvcq.runtime.compat import Sealed, check_model
from kvcq.runtime.hf.kernels import _same_words
from kvcq.runtime.layout import kv_bytes_per_token
from kvcq.spec.geometry import LayerGeometry, ModelGeometry
from kvcq.spec.identity import Identity
from kvcq.spec.plan import Windows
from tests.chain import contents


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder without weights, its geometry, and what is known of it."""
    folder, config = tmp_path_factory.mktemp("weightless") / "qwen3-8b", shape_config("qwen3-8b", 2)
    write_model(folder, config)
    geometry = config_geometry(config)
    return folder, geometry, load_outline(str(folder), geometry)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bundle_opens_and_is_of_the_model(model, tmp_path, kind):
    _, geometry, outline = model
    path = tmp_path / "a.kvcq"
    manifest = write_synthetic(path, kind, geometry, outline.identity, seed=3)
    found = read_any(path)
    assert isinstance(found, Bundle) and found.manifest == manifest
    assert manifest.geometry == geometry and manifest.identity == outline.identity
    sealed = Sealed(path.name, manifest.identity, manifest.provenance, manifest.geometry)
    check_model(sealed, outline, strict=False)
    write_synthetic(tmp_path / "b.kvcq", kind, geometry, outline.identity, seed=3)
    assert contents(path) == contents(tmp_path / "b.kvcq")
    assert write_synthetic(tmp_path / "c.kvcq", kind, geometry, outline.identity, seed=4).digest != manifest.digest
    # 2-bit rows with two fp16 numbers a side: 72 bytes a token and head at d = 128, BF16 512.
    assert kv_bytes_per_token(manifest.plan, geometry) == 2 * 8 * 72
    assert kv_bytes_per_token((), geometry) == 2 * 8 * 512


@pytest.mark.parametrize("kind", KINDS)
def test_its_codecs_and_tables_build_and_code_rows(model, tmp_path, kind):
    _, geometry, outline = model
    write_synthetic(tmp_path / "a.kvcq", kind, geometry, outline.identity)
    bundle = open_bundle(tmp_path / "a.kvcq")
    codecs = served_codecs(bundle.manifest.plan, geometry, bundle.tensors, "cpu")
    assert set(codecs) == {0, 1} and all(isinstance(codec, HeadCodec) for codec in codecs.values())
    tables = Tables.of(codecs[1], 8, 128, 128, torch.float32, torch.device("cpu"))
    assert tables.vq == (kind == "vq") and tables.words == 1
    assert _same_words(tables, codecs[1])
    rows = torch.randn(8, 16, 128, generator=torch.Generator().manual_seed(0))
    codec = codecs[1]
    k, v = codec.key_frame(rows), codec.value_frame(rows)
    back = ((codec.decode_keys(codec.encode_keys(k)), k), (codec.decode_values(codec.encode_values(v)), v))
    # Random words keep something of random rows too: it is a code, not noise.
    assert all((again - row).norm() / row.norm() < 1.0 for again, row in back)


def test_it_says_what_it_is(model, tmp_path):
    _, geometry, outline = model
    manifest = write_synthetic(tmp_path / "a.kvcq", "int2", geometry, outline.identity)
    bundle = open_bundle(tmp_path / "a.kvcq")
    assert manifest.recipe.method == "synthetic-int2" and manifest.provenance.source.startswith("synthetic")
    assert "nothing here says anything about accuracy" in bundle.card and not manifest.validation.contexts
    assert bundle.row.warnings and bundle.report.warnings


def test_other_geometries_and_what_is_refused(tmp_path):
    identity = Identity(geometry="g", vocabulary="v", norms={}, biases={})
    full = LayerGeometry(layer=0, kind="full", q_heads=6, kv_heads=2, d_k=64, d_v=96)
    slides = LayerGeometry(layer=1, kind="sliding", q_heads=6, kv_heads=2, d_k=64, d_v=96, window=128)
    geometry = ModelGeometry(model_type="x", hidden_size=64, vocab_size=300, layers=(full, slides))
    windows = Windows(sink=4, recent=8)
    for kind in KINDS:
        write_synthetic(tmp_path / f"{kind}.kvcq", kind, geometry, identity, windows=windows)
        manifest = open_bundle(tmp_path / f"{kind}.kvcq").manifest
        assert [entry.quantized for entry in manifest.plan] == [True, False] and manifest.recipe.windows == windows
    with pytest.raises(InputError, match="kinds"):
        write_synthetic(tmp_path / "x.kvcq", "int3", geometry, identity)
    with pytest.raises(InputError, match="exists"):
        write_synthetic(tmp_path / "vq.kvcq", "vq", geometry, identity)


def test_rotations_are_rotations():
    found = rotations(np.random.default_rng(0), 3, 64)
    assert found.dtype == np.float32
    assert np.abs(found @ found.swapaxes(1, 2) - np.eye(64)).max() < 1e-5
    assert np.abs(found).mean() > 0.5 / 8


def test_the_tokenizer_knows_bytes_and_ends(model):
    tokenizer = AutoTokenizer.from_pretrained(model[0])
    ids = tokenizer("wörld 42").input_ids
    assert tokenizer.decode(ids) == "wörld 42" and max(ids) < 256
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (256, 257, 258)
    assert len(set(byte_characters())) == 256


@pytest.mark.parametrize("name", SHAPES)
def test_the_geometry_of_a_shape_is_what_the_library_makes_of_it(name, tmp_path):
    # A twin with few weights shows what the shape's own model would: layers, heads, dims, RoPE.
    config = shape_config(name, 2) | {"hidden_size": 64, "intermediate_size": 32, "vocab_size": 300}
    write_model(tmp_path / "m", config)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "m"))
    planned, own = plan_geometry(made), config_geometry(config)
    specs, _ = rope_specs(made)
    assert (planned.model_type, planned.hidden_size, planned.vocab_size) == ("qwen3", 64, 300)
    for there, here in zip(planned.layers, own.layers, strict=True):
        assert (there.kind, there.q_heads, there.kv_heads) == (here.kind, here.q_heads, here.kv_heads)
        assert (there.d_k, there.d_v) == (here.d_k, here.d_v)
    assert len(specs) == 1 and specs[0].pairing == own.ropes[0].pairing
    assert np.allclose(specs[0].inv_freq, own.ropes[0].inv_freq, rtol=1e-5)
    # Bytes of a step: every matrix but the embedding, whose rows are looked up; here it is tied, or the head's twin.
    counted = sum(p.numel() for n, p in made.named_parameters() if p.dim() == 2 and "embed_tokens" not in n)
    head = 0 if not config["tie_word_embeddings"] else 300 * 64
    assert step_weights(config) == 2 * (counted + head)


def test_bytes_of_a_step_are_known_for_plain_models_only():
    assert step_weights(shape_config("qwen3-8b")) == pytest.approx(15.1e9, rel=0.01)
    assert step_weights(shape_config("qwen3-8b", 12)) == pytest.approx(5.9e9, rel=0.02)
    assert step_weights(shape_config("qwen3-8b") | {"num_experts": 8}) is None
    assert step_weights({"hidden_size": 3}) is None


@pytest.mark.parametrize(("name", "layers"), [("qwen3-9b", None), ("qwen3-8b", 0)])
def test_other_shapes_are_refused(name, layers):
    with pytest.raises(InputError):
        shape_config(name, layers)


def test_a_folder_holds_json_only(model):
    names = {path.name for path in model[0].iterdir()}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert json.loads((model[0] / "config.json").read_text())["num_hidden_layers"] == 2
