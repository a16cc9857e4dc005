"""Fits of codecs that no page holds: their tensors, plans and windows are checked like all others."""

import numpy as np
import pytest

from kvcq.artifacts.fit_file import read_fit, write_fit
from kvcq.artifacts.verify import verify
from kvcq.errors import CorruptArtifactError, InputError
from kvcq.spec.codec import CodecSpec
from kvcq.spec.plan import LayerPlan
from tests.artifacts.example import DIM, HEADS, fit_header, geometry, rotations
from tests.attacks.hostile import edit_header

PLAN = (
    LayerPlan(
        layer=0,
        k=CodecSpec(quantizer="levels", unit="channel", outliers=0.01, pre_rope=True),
        v=CodecSpec(transform="orthogonal", quantizer="levels", unit="norm", bits=3),
    ),
    LayerPlan(
        layer=1,
        k=CodecSpec(quantizer="token_group", group_tokens=128, group_start=64, promoted=0.125),
        v=CodecSpec(bits=4, reordered=True),
    ),
    LayerPlan(layer=2, reason="sliding attention layer"),
)
LEVELS, BOUNDS, ORDER = "layers.0.k.levels", "layers.0.k.bounds", "layers.1.v.order"


def tensors():
    rng = np.random.default_rng(0)
    bounds = rng.uniform(0.5, 2.0, (HEADS, DIM, 2)).astype(np.float32) * np.float32([-1, 1])
    return {
        BOUNDS: bounds,
        LEVELS: np.sort(rng.standard_normal((HEADS, 4)).astype(np.float32), -1),
        "layers.0.v.levels": np.sort(rng.standard_normal((HEADS, 8)).astype(np.float32), -1),
        "layers.0.v.transform": rotations(rng),
        ORDER: rng.permutation(HEADS * DIM).astype(np.int32).reshape(HEADS, DIM),
    }


def shape(**changes):
    whole = geometry()
    layers = tuple(layer.model_copy(update={"unrotates": True} | changes) for layer in whole.layers)
    return whole.model_copy(update={"layers": layers})


def write(folder, changed=None):
    return write_fit(folder, fit_header(PLAN, shape()), tensors() | (changed or {}))


def test_plans_and_tensors_survive_the_folder(tmp_path):
    write(tmp_path / "fit")
    verify(tmp_path / "fit")
    back = read_fit(tmp_path / "fit")
    assert back.header.plan == PLAN
    assert {name: array.tobytes() for name, array in back.tensors.items()} == {
        name: array.tobytes() for name, array in tensors().items()
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({LEVELS: tensors()[LEVELS][:, ::-1].copy()}, "k.levels does not rise"),
        ({BOUNDS: np.zeros_like(tensors()[BOUNDS])}, "k.bounds does not rise"),
        ({BOUNDS: tensors()[BOUNDS] * np.float32(1e9)}, "k.bounds has values beyond 65504"),
        ({ORDER: tensors()[ORDER] % 5}, "v.order is no permutation"),
        ({ORDER: tensors()[ORDER] + 1}, "v.order is no permutation"),
        ({ORDER: tensors()[ORDER].astype(np.int64)}, "is I64"),
        ({LEVELS: np.full_like(tensors()[LEVELS], np.nan)}, "k.levels has values that are not finite"),
        ({LEVELS: tensors()["layers.0.v.levels"]}, r"F32 \[2, 8\] .* the plan calls for F32 \[2, 4\]"),
        ({"layers.1.k.levels": tensors()[LEVELS]}, "not called for"),
    ],
)
def test_tensors_that_do_not_mean_the_plan_are_not_written(tmp_path, changed, message):
    with pytest.raises(InputError, match=message):
        write(tmp_path / "fit", changed)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["plan"][1]["k"].update(group_start=32), "layer 1 k: groups of 128 tokens from 32 on do not fit"),
        (lambda h: h["plan"][1]["k"].update(group_tokens=512), "groups of 512 tokens from 64 on do not fit"),
        (lambda h: h["recipe"]["windows"].update(recent=100), "do not fit the windows"),
        (lambda h: h["plan"][1]["v"].update(pre_rope=True), "layer 1: rows that RoPE cannot be taken off"),
        (lambda h: h["geometry"]["layers"][0].update(unrotates=False), "layer 0: rows that RoPE cannot be taken off"),
        (lambda h: h["plan"][0]["k"].update(unit="range"), "bounds is not called for"),
        (lambda h: h["plan"][0]["k"].update(bits=3), "the plan calls for"),
        (lambda h: h["plan"][1]["k"].update(quantizer="uniform"), "belong to token_group"),
        (lambda h: h["plan"][0]["k"].update(promoted=0.0), "left out or has another type"),
    ],
)
def test_plans_that_cannot_be_are_refused(tmp_path, change, message):
    write(tmp_path / "fit")
    edit_header(tmp_path / "fit", "fit", change)
    with pytest.raises(CorruptArtifactError, match=message):
        verify(tmp_path / "fit")
