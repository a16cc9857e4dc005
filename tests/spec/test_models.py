import subprocess
import sys
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvcq import errors
from kvcq.spec import canonical, codec
from kvcq.spec.codec import CodecSpec
from kvcq.spec.files import FileEntry, TensorEntry
from kvcq.spec.geometry import LayerGeometry, ModelGeometry, RopeSpec
from kvcq.spec.identity import Identity
from kvcq.spec.plan import LayerPlan, Windows
from kvcq.spec.recipe import Recipe

ZERO = "0" * 64


@st.composite
def codecs(draw):
    quantizer = draw(st.sampled_from(get_args(codec.Quantizer)))
    vq, levels, runs = (quantizer == name for name in ("group_vq", "levels", "token_group"))
    bits = draw(st.integers(1, codec.MAX_LEVEL_BITS if levels or runs else 8))
    spacings = get_args(codec.Spacing) if (quantizer, bits) == ("uniform", 2) else ("minmax",)
    plain = levels or runs
    unit = draw(st.sampled_from(get_args(codec.Unit))) if levels else None
    pre_rope = draw(st.booleans()) and not vq
    reordered = quantizer == "uniform" and draw(st.booleans())
    return CodecSpec(
        transform=draw(st.sampled_from([t for t in get_args(codec.Transform) if not (pre_rope and t == "metric")])),
        centred=draw(st.booleans()) and not pre_rope,
        quantizer=quantizer,
        bits=bits,
        groups=1 if vq or plain else draw(st.integers(1, 64)),
        reordered=reordered,
        clip=1.0 if plain or reordered else draw(st.floats(0, 1, exclude_min=True)),
        metadata=draw(st.sampled_from(get_args(codec.Metadata))),
        codebook=draw(st.sampled_from(get_args(codec.CodebookDtype))) if vq else None,
        spacing=draw(st.sampled_from(spacings)),
        unit=unit,
        outliers=draw(st.floats(0, 0.1)) if unit in ("range", "channel") else 0.0,
        pre_rope=pre_rope,
        group_tokens=draw(st.integers(1, 256)) if runs else 1,
        group_start=draw(st.integers(0, 256)) if runs else 0,
        promoted=draw(st.floats(0, 0.5)) if runs else 0.0,
    )


@st.composite
def plans(draw):
    layer = draw(st.integers(0, 100))
    if draw(st.booleans()):
        return LayerPlan(layer=layer, reason=draw(st.text(min_size=1, max_size=9)))
    return LayerPlan(layer=layer, k=draw(codecs()), v=draw(codecs()))


recipes = st.builds(
    Recipe,
    method=st.sampled_from(["nova", "oscar"]),
    params=st.dictionaries(
        st.text(max_size=4), st.none() | st.booleans() | st.integers(0, 99) | st.floats(-9, 9) | st.text(max_size=4)
    ),
    windows=st.builds(Windows, sink=st.integers(0, 99), recent=st.integers(0, 999)),
    skip_layers=st.lists(st.integers(0, 99)).map(tuple),
    target_context=st.none() | st.integers(1, 10**6),
    seed=st.integers(0, 2**32 - 1),
)


@given(plans() | recipes | codecs())
def test_a_record_survives_its_canonical_json(record):
    data = canonical.dumps(record.plain())
    again = type(record).model_validate_json(data)
    assert canonical.dumps(again.plain()) == data
    assert again == record


def test_a_codec_of_the_first_format_keeps_its_one_form():
    assert set(CodecSpec().plain()) == set(CodecSpec.model_fields) - CodecSpec.LATER


@given(recipes)
def test_parameters_keep_their_type(recipe):
    again = Recipe.model_validate_json(canonical.dumps(recipe.plain()))
    assert [type(value) for value in again.params.values()] == [type(recipe.params[name]) for name in again.params]


@given(plans())
def test_a_plan_is_quantized_or_has_a_reason(plan):
    assert plan.quantized == (plan.reason is None) == (plan.k is not None)


@given(codecs())
def test_a_served_codec_has_2_bits_and_fp16_metadata(spec):
    if spec.served:
        assert spec.bits == 2 and spec.metadata == "fp16-bias" and spec.groups in (1, 4)
        assert spec.quantizer == "uniform" or spec.codebook == "int8"
        assert spec.by_row
    else:
        assert spec.unserved


def test_the_layouts_that_kernels_read_are_served():
    assert CodecSpec(groups=4).served and CodecSpec(quantizer="group_vq", codebook="int8").served
    for changes in (
        {"bits": 4},
        {"groups": 2},
        {"metadata": "fp32-zero"},
        {"quantizer": "levels", "unit": "norm"},
        {"quantizer": "token_group", "group_tokens": 32},
        {"pre_rope": True},
        {"quantizer": "group_vq", "codebook": "e4m3"},
    ):
        assert not CodecSpec(**changes).served


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (CodecSpec, {"quantizer": "group_vq"}),
        (CodecSpec, {"quantizer": "levels"}),
        (CodecSpec, {"unit": "norm"}),
        (CodecSpec, {"outliers": 0.01}),
        (CodecSpec, {"quantizer": "levels", "unit": "norm", "outliers": 0.01}),
        (CodecSpec, {"quantizer": "levels", "unit": "range", "bits": 5}),
        (CodecSpec, {"quantizer": "levels", "unit": "range", "clip": 0.9}),
        (CodecSpec, {"group_tokens": 32}),
        (CodecSpec, {"reordered": True, "clip": 0.9}),
        (CodecSpec, {"reordered": True, "quantizer": "none"}),
        (CodecSpec, {"promoted": 0.1}),
        (CodecSpec, {"quantizer": "token_group", "group_tokens": 32, "groups": 4}),
        (CodecSpec, {"pre_rope": True, "centred": True}),
        (CodecSpec, {"pre_rope": True, "transform": "metric"}),
        (CodecSpec, {"spacing": "lloyd-main", "bits": 3}),
        (CodecSpec, {"spacing": "lloyd-nova", "quantizer": "none"}),
        (CodecSpec, {"codebook": "int8"}),
        (CodecSpec, {"quantizer": "group_vq", "codebook": "int8", "groups": 4}),
        (CodecSpec, {"clip": 0.0}),
        (CodecSpec, {"clip": float("nan")}),
        (CodecSpec, {"bits": 0}),
        (CodecSpec, {"transform": "kvcq.evil:Class"}),
        (CodecSpec, {"unknown": 1}),
        (LayerPlan, {"layer": 0}),
        (LayerPlan, {"layer": 0, "k": CodecSpec(), "reason": "x"}),
        (LayerPlan, {"layer": 0, "k": CodecSpec(), "v": CodecSpec(), "reason": "x"}),
        (LayerPlan, {"layer": -1, "reason": "x"}),
        (Windows, {"sink": -1}),
        (Recipe, {"method": "x", "seed": 2**32}),
        (Recipe, {"method": "x", "target_context": 0}),
        (Recipe, {"method": "x", "params": {"a": [1]}}),
        (RopeSpec, {"rotary_dims": 4, "inv_freq": (1.0,)}),
        (RopeSpec, {"rotary_dims": 2, "inv_freq": (float("inf"),)}),
        (RopeSpec, {"rotary_dims": 2, "inv_freq": (1e308,)}),
        (RopeSpec, {"rotary_dims": 2, "inv_freq": (1.0,), "attention_scaling": -1e308}),
        (RopeSpec, {"rotary_dims": 2, "inv_freq": (1.0,), "sense": 0}),
        (FileEntry, {"name": "a.json", "size": 1, "sha256": "0" * 63}),
        (FileEntry, {"name": "a.json", "size": -1, "sha256": ZERO}),
        (TensorEntry, {"name": "a/b", "role": "a", "shape": (1,), "dtype": "F32"}),
    ],
)
def test_impossible_records_are_refused(model, fields):
    with pytest.raises(ValidationError):
        model(**fields)


@pytest.mark.parametrize(
    "name",
    ["..", "../a.json", "/a.json", "a/b.json", "a\\b.json", "C:a.json", ".a.json", "A.json", "a", "a.json\n",
     "a.json\0", "é.json", "a" * 65 + ".json", "a.b.c.json", "readme.MD"],
)  # fmt: skip
def test_names_that_could_leave_a_folder_are_refused(name):
    with pytest.raises(ValidationError):
        FileEntry(name=name, size=0, sha256=ZERO)


@pytest.mark.parametrize("name", ["kvcq.json", "README.md", "kvcq.safetensors", "canary-10.safetensors", "a_b.tar.gz"])
def test_names_of_artifacts_are_allowed(name):
    assert FileEntry(name=name, size=0, sha256=ZERO).name == name


def test_records_are_frozen():
    with pytest.raises(ValidationError):
        Windows().sink = 3


def test_geometry_finds_ropes_groups_and_growing_layers():
    rope = RopeSpec(rotary_dims=4, inv_freq=(1.0, 0.1))
    layers = tuple(
        LayerGeometry(layer=i, kind=kind, q_heads=6, kv_heads=2, d_k=8, d_v=8, rope=None if i == 1 else 0)
        for i, kind in enumerate(["full", "full", "sliding", "linear"])
    )
    model = ModelGeometry(model_type="t", hidden_size=8, vocab_size=9, ropes=(rope,), layers=layers)
    assert model.rope_of(layers[0]) == rope and model.rope_of(layers[1]) is None
    assert [layer.layer for layer in model.quantizable()] == [0, 1]
    assert layers[0].group == 3


def test_identity_digest_covers_every_field():
    base = Identity(geometry=ZERO, vocabulary=ZERO, norms={"eps": 1e-6}, biases={"qkv": False})
    others = [
        base.model_copy(update={"geometry": "1" * 64}),
        base.model_copy(update={"vocabulary": "1" * 64}),
        base.model_copy(update={"norms": {"eps": 1e-5}}),
        base.model_copy(update={"biases": {"qkv": True}}),
    ]
    assert len({identity.digest() for identity in [base, *others]}) == 5


def test_an_error_is_one_line_with_its_own_exit_code():
    error = errors.CorruptArtifactError("cut\nshort", where="a.json", fix="copy it again")
    assert str(error) == "cut short (a.json): copy it again" and error.exit_code == 4
    assert str(errors.InputError("bad")) == "bad"
    codes = {
        errors.KvcqError: 1, errors.EvaluationError: 1, errors.InputError: 2, errors.UnsupportedError: 2,
        errors.GateFailed: 3, errors.CorruptArtifactError: 4, errors.MismatchError: 5, errors.ResourceError: 6,
        errors.UnavailableError: 7,
    }  # fmt: skip
    assert all(kind.exit_code == code for kind, code in codes.items())


def test_the_vocabulary_imports_neither_torch_nor_numpy():
    code = (
        "import importlib, pkgutil, sys, kvcq.spec\n"
        "for m in pkgutil.iter_modules(kvcq.spec.__path__): importlib.import_module('kvcq.spec.' + m.name)\n"
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
