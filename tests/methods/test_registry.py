from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from kvcq.codecs.pair import HeadCodec
from kvcq.errors import InputError, UnavailableError, UnsupportedError
from kvcq.methods import registry
from kvcq.methods.base import FitContext, LayerFit, Method, parameter
from kvcq.methods.naive_int2 import NaiveInt2
from kvcq.spec.plan import LayerPlan
from tests.methods.synthetic import anisotropic


@dataclass(frozen=True)
class Foreign(Method):
    name = "foreign"
    summary = "brought by another package"
    strength: int = parameter(3, "how much", low=1)
    ratio: float = parameter(0.5, "any number")

    def fit_layer(self, stats: Any, context: FitContext) -> LayerFit:
        return NaiveInt2().fit_layer(stats, context)


@dataclass(frozen=True)
class Undeclared(Foreign):
    loose: int = 1


NOT_A_METHOD = 7


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    here = __name__
    points = [
        EntryPoint("foreign", f"{here}:Foreign", registry.GROUP),
        EntryPoint("broken", "no_such_module:Broken", registry.GROUP),
        EntryPoint("wrong", f"{here}:NOT_A_METHOD", registry.GROUP),
        EntryPoint("undeclared", f"{here}:Undeclared", registry.GROUP),
        EntryPoint("oscar", f"{here}:Foreign", registry.GROUP),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    monkeypatch.setitem(sys.modules, here, sys.modules[__name__])


def test_names_classes_and_modules_agree() -> None:
    for name, target in registry.BUILT_IN.items():
        assert registry.load(name).name == name
        assert target.partition(":")[0] == f"kvcq.methods.{name.replace('-', '_')}"


def test_listing_imports_neither_torch_nor_numpy() -> None:
    script = (
        "import sys; from kvcq.methods import registry; rows = registry.describe(); registry.create('nova', {});"
        "assert len(rows) >= 7 and all(row.problem or row.summary for row in rows);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_every_parameter_is_described() -> None:
    for row in registry.describe():
        for item in row.parameters:
            assert item.doc and item.allowed
            assert registry.create(row.name, {item.name: item.default}) == registry.create(row.name)


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("oscra", {}, "did you mean 'oscar'"),
        ("zzz", {}, "known: bf16"),
        ("oscar", {"clipk": 1.0}, "did you mean 'clip_k'"),
        ("bf16", {"clip": 1.0}, "no parameters"),
        ("oscar", {"clip_k": 1.5}, "0.01 to 1"),
        ("oscar", {"clip_k": float("nan")}, "0.01 to 1"),
        ("oscar", {"clip_k": "high"}, "a float"),
        ("oscar", {"granularity": "heads"}, "head or layer"),
        ("nova", {"iterations": True}, "an int"),
        ("nova", {"iterations": 2.0}, "an int"),
        ("nova", {"iterations": 0}, "1 to 1000"),
        ("naive-int2", {"groups": 0}, "at least 1"),
        ("nova", {"partition": None}, "deal or snake"),
        ("oscar-vq", {"centred": "yes"}, "true or false"),
        ("oscar", {"ablate": "u"}, "none or no-u or no-h or no-p"),
    ],
)
def test_bad_names_and_values_are_refused_in_one_line(name: str, params: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        registry.create(name, params)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_int_serves_for_a_float() -> None:
    clip = registry.create("oscar", {"clip_k": 1}).clip_k  # type: ignore[attr-defined]
    assert type(clip) is float


@pytest.mark.usefixtures("plugins")
def test_entry_points_bring_methods() -> None:
    assert registry.available()[-4:] == ["broken", "foreign", "undeclared", "wrong"]
    method = registry.create("foreign", {"strength": 5})
    assert method == Foreign(strength=5)
    described = {row.name: row for row in registry.describe()}
    assert described["foreign"].summary == Foreign.summary
    assert [item.allowed for item in described["foreign"].parameters] == ["an int of at least 1", "a float"]


@pytest.mark.usefixtures("plugins")
def test_entry_points_cannot_replace_a_built_in_method() -> None:
    assert registry.available().count("oscar") == 1
    assert registry.load("oscar").__module__ == "kvcq.methods.oscar"


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize("name", ["broken", "wrong", "undeclared"])
def test_a_broken_package_is_named_and_does_not_break_the_list(name: str) -> None:
    with pytest.raises(UnavailableError, match=name):
        registry.create(name)
    assert {row.name: row for row in registry.describe()}[name].problem


def test_bf16_changes_nothing() -> None:
    method = registry.create("bf16")
    stats = anisotropic(tokens=64)
    result = method.fit_layer(stats, FitContext())
    assert not method.quantizes
    assert result.tensors == {}
    codec = HeadCodec.build(LayerPlan(layer=0, k=result.k, v=result.v), stats.geometry, {})
    assert codec.decode_keys(codec.encode_keys(codec.key_frame(stats.k_rows))).equal(stats.k_rows)


def test_layers_that_a_method_cannot_code_are_refused() -> None:
    odd = anisotropic(heads=1, d=6, tokens=64).geometry
    with pytest.raises(UnsupportedError, match="head dimension 6"):
        registry.create("nova").check(odd)
    with pytest.raises(InputError, match=r"use groups=1 \(6 channels each\); to compare only: 2, 3, 6"):
        registry.create("oscar", {"groups": 4}).check(odd)
    registry.create("bf16").check(odd)


def test_methods_that_need_rows_say_so() -> None:
    stats = anisotropic(heads=1, tokens=64)
    empty = type(stats)(**{**vars(stats), "k_rows": stats.k_rows[:, :0], "v_rows": stats.v_rows[:, :0]})
    for name in ("oscar", "nova"):
        with pytest.raises(InputError, match="no sampled"):
            registry.create(name).fit_layer(empty, FitContext())
    registry.create("oscar", {"value_target": "attention_output"}).fit_layer(empty, FitContext())
