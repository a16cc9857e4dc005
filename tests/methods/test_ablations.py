"""Ablations of OSCAR and its crosses with NOVA-KV: what each leaves out, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvcq.artifacts.semantics import check_index, check_values
from kvcq.artifacts.tensors import tensor_index
from kvcq.codecs.encoded import Encoded
from kvcq.codecs.packing import unpack2
from kvcq.codecs.pair import HeadCodec
from kvcq.errors import UnsupportedError
from kvcq.methods.base import FitContext, LayerFit
from kvcq.methods.gain import key_error
from kvcq.methods.registry import create
from kvcq.spec.codec import VQ_GROUP
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.plan import LayerPlan
from kvcq.transforms.hadamard import hadamard
from kvcq.transforms.permutation import partition, spread_order
from tests.methods.synthetic import anisotropic

STATS = anisotropic()
D = STATS.geometry.d_k
ORDER = spread_order(D)
QUERIES = STATS.moments["q_second"]


def fit(name: str, seed: int = 0, **params: Any) -> LayerFit:
    return create(name, params).fit_layer(STATS, FitContext(seed=seed))


def keys_map(result: LayerFit) -> Tensor:
    return torch.from_numpy(result.tensors["k.transform"]).double()


def diagonal(result: LayerFit, moment: Tensor) -> Tensor:
    rotation = keys_map(result)
    return torch.diagonal(rotation.mT @ moment @ rotation, dim1=-2, dim2=-1)


def codec(result: LayerFit) -> HeadCodec:
    return HeadCodec.build(LayerPlan(layer=0, k=result.k, v=result.v), STATS.geometry, result.tensors)


def coded(result: LayerFit) -> tuple[Encoded, Encoded]:
    own = codec(result)
    return own.encode_keys(own.key_frame(STATS.k_rows)), own.encode_values(own.value_frame(STATS.v_rows))


def lost(name: str, **params: Any) -> float:
    result = fit(name, **params)
    return float(key_error(result.k, result.tensors, STATS.k_rows, QUERIES).sum())


def same_arrays(a: LayerFit, b: LayerFit) -> bool:
    return a.tensors.keys() == b.tensors.keys() and all(np.array_equal(a.tensors[n], b.tensors[n]) for n in a.tensors)


@pytest.mark.parametrize("name", ["oscar", "oscar-centered", "oscar-lloyd"])
def test_at_one_group_no_p_gives_the_codes_of_oscar_in_another_order(name: str) -> None:
    for whole, without in zip(coded(fit(name)), coded(fit(name, ablate="no-p")), strict=True):
        assert torch.equal(unpack2(without.codes)[..., ORDER], unpack2(whole.codes))
        assert torch.equal(without.scale, whole.scale)
        assert torch.equal(without.bias, whole.bias)


def test_at_four_groups_p_changes_the_codes() -> None:
    whole, without = (coded(fit("oscar", groups=4, ablate=ablate))[0] for ablate in ("none", "no-p"))
    assert not torch.equal(unpack2(without.codes)[..., ORDER], unpack2(whole.codes))
    assert not torch.equal(without.scale, whole.scale)


def test_each_ablation_leaves_out_one_factor() -> None:
    mixer = hadamard(D).float()
    assert torch.equal(keys_map(fit("oscar", ablate="no-u"))[0], mixer[:, ORDER].double())
    plain, mixed = (keys_map(fit("oscar", ablate=ablate)) for ablate in ("no-h", "none"))
    axes = torch.empty_like(plain)
    axes[..., ORDER] = plain  # undo P: the eigenvectors, ascending
    spectrum = torch.diagonal(axes.mT @ QUERIES @ axes, dim1=-2, dim2=-1)
    torch.testing.assert_close(spectrum, torch.linalg.eigvalsh(QUERIES), rtol=1e-4, atol=1e-8)
    torch.testing.assert_close((axes @ hadamard(D))[..., ORDER], mixed, rtol=0, atol=1e-6)
    torch.testing.assert_close(keys_map(fit("oscar", ablate="no-p"))[..., ORDER], mixed, rtol=0, atol=0)


def test_signs_of_no_u_are_those_of_the_axes() -> None:
    first, second = (keys_map(fit("oscar", ablate="no-u", signs=draw)) for draw in (0, 3))
    assert not torch.equal(first, second)
    torch.testing.assert_close(first.abs(), second.abs(), rtol=0, atol=0)


def test_targets_of_the_coded_rows_themselves_are_klt() -> None:
    assert same_arrays(fit("oscar", key_target="key", value_target="value", signs=2), fit("klt-int2", signs=2))
    centred = fit("oscar-centered", key_target="key", value_target="value")
    flat = torch.diagonal(STATS.k_cov, dim1=-2, dim2=-1).mean(-1, keepdim=True).expand(-1, D)
    torch.testing.assert_close(diagonal(centred, STATS.k_cov), flat, rtol=1e-5, atol=0)
    assert "value_rows" not in centred.notes


def test_lloyd_changes_the_spacing_of_oscar_only() -> None:
    plain = fit("oscar", signs=1)
    for variant in ("nova", "main"):
        result = fit("oscar-lloyd", variant=variant, signs=1)
        assert same_arrays(result, plain)
        assert result.k == plain.k.model_copy(update={"spacing": f"lloyd-{variant}"})
        assert result.v == plain.v.model_copy(update={"spacing": f"lloyd-{variant}"})
    assert fit("oscar-lloyd").k.spacing == "lloyd-nova"


def test_the_cross_has_the_rotation_of_one_and_the_quantizer_of_the_other() -> None:
    for centred, plain in ((False, "oscar"), (True, "oscar-centered")):
        cross = fit("oscar-vq", centred=centred, iterations=2, signs=1)
        shared = fit(plain, signs=1).tensors
        assert all(np.array_equal(cross.tensors[role], shared[role]) for role in shared)
        assert (cross.k.quantizer, cross.k.centred, cross.v.centred) == ("group_vq", centred, centred)
    assert lost("oscar-vq", centred=True, iterations=4) < lost("oscar-vq", iterations=4)
    assert lost("nova", iterations=4) < lost("oscar-vq", centred=True, iterations=4) < lost("oscar-centered")


def test_scalar_codes_take_the_basis_of_nova() -> None:
    scalar, sorted_axes = fit("nova-sq"), fit("nova", partition="sorted", iterations=1)
    for role in ("k.transform", "k.query", "k.offset", "v.transform"):
        assert np.array_equal(scalar.tensors[role], sorted_axes.tensors[role])
    spread = diagonal(scalar, STATS.k_cov)
    assert (spread.diff(dim=-1) <= 1e-9).all()
    assert lost("nova", iterations=4) < lost("nova-sq")


def test_the_appended_hadamard_levels_the_variances() -> None:
    mixed = diagonal(fit("nova-sq", hadamard=True), STATS.k_cov)
    torch.testing.assert_close(mixed, mixed.mean(-1, keepdim=True).expand(-1, D), rtol=1e-5, atol=0)
    torch.testing.assert_close(mixed.sum(-1), diagonal(fit("nova-sq"), STATS.k_cov).sum(-1), rtol=1e-5, atol=0)
    assert lost("nova-sq", hadamard=True) < lost("nova-sq")


def test_the_random_partition_is_a_permutation_drawn_by_the_seed() -> None:
    ranked = fit("nova", partition="sorted", iterations=1).tensors["k.transform"]
    draws = [fit("nova", seed=seed, partition="random", iterations=1).tensors["k.transform"] for seed in (0, 1, 0)]
    for seed, found in zip((0, 1, 0), draws, strict=True):
        assert np.array_equal(found, ranked[..., partition("random", D, VQ_GROUP, seed).numpy()])
    assert np.array_equal(draws[0], draws[2])
    assert not np.array_equal(draws[0], draws[1])


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("oscar-vq", {"iterations": 1}),
        ("oscar-vq", {"iterations": 1, "centred": True}),
        ("nova-sq", {"hadamard": True}),
        ("oscar-lloyd", {"groups": 4}),
        ("oscar", {"ablate": "no-h"}),
    ],
)
def test_artifacts_take_the_crosses(name: str, params: dict[str, Any]) -> None:
    result = fit(name, **params)
    assert result.k.served
    assert result.v.served
    plan = [LayerPlan(layer=0, k=result.k, v=result.v)]
    geometry = ModelGeometry(model_type="llama", hidden_size=64, vocab_size=9, layers=(STATS.geometry,))
    tensors = {f"layers.0.{role}": array for role, array in result.tensors.items()}
    check_index(tensor_index(tensors), plan, geometry, "fit")
    check_values(plan, tensors, "fit")


def test_the_crosses_refuse_what_groups_of_four_do_not_divide() -> None:
    for name in ("oscar-vq", "nova"):
        create(name).check(STATS.geometry)
        with pytest.raises(UnsupportedError, match=f"{name} codes 4 channels a word"):
            create(name).check(STATS.geometry.model_copy(update={"d_k": 6}))
