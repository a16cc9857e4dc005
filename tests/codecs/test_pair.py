"""Laws of HeadCodec over a table of codecs."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvcq.codecs.codebook import snap_float8, snap_int8
from kvcq.codecs.encoded import affine_words
from kvcq.codecs.packing import decode_pages, encode_pages
from kvcq.codecs.pair import HeadCodec, layer_roles
from kvcq.errors import CorruptArtifactError, UnsupportedError
from kvcq.spec.codec import CodecSpec
from kvcq.spec.geometry import LayerGeometry
from kvcq.spec.plan import LayerPlan
from kvcq.transforms.metric import nova_transform, unit_metric
from kvcq.transforms.spectral import compose_oscar, eigh_sorted
from tests.transforms.test_spectral import moments

H, HQ, D, DV, T = 2, 4, 32, 16, 37
GEOMETRY = LayerGeometry(layer=3, kind="full", q_heads=HQ, kv_heads=H, d_k=D, d_v=DV)

KEYS = {
    "plain": CodecSpec(),
    "lossless": CodecSpec(transform="orthogonal", centred=True, quantizer="none"),
    "oscar": CodecSpec(transform="orthogonal", clip=0.96),
    "oscar_groups": CodecSpec(transform="orthogonal", centred=True, groups=4, clip=0.96),
    "reference": CodecSpec(transform="orthogonal", metadata="fp32-zero"),
    "lloyd": CodecSpec(transform="orthogonal", clip=0.96, spacing="lloyd-nova"),
    "vq_orthogonal": CodecSpec(transform="orthogonal", centred=True, quantizer="group_vq", codebook="int8"),
    "four_bits": CodecSpec(transform="orthogonal", bits=4),
    "nova": CodecSpec(transform="metric", centred=True, quantizer="group_vq", codebook="int8"),
    "nova_e4m3": CodecSpec(
        transform="metric", centred=True, quantizer="group_vq", codebook="e4m3", metadata="fp32-zero"
    ),
}
VALUE_DEFAULT = CodecSpec(transform="orthogonal", clip=0.92)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(seed: int, d: int) -> Tensor:
    return compose_oscar(eigh_sorted(moments(seed, H, d))[1]).float()


def tensors(k: CodecSpec, v: CodecSpec, seed: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for side, spec, d in (("k", k, D), ("v", v, DV)):
        if spec.transform == "orthogonal":
            found[f"{side}.transform"] = rotation(seed, d).numpy()
        elif spec.transform == "metric":
            forward, dual, _ = nova_transform(unit_metric(moments(seed, H, d)), moments(seed + 1, H, d))
            found[f"{side}.transform"], found[f"{side}.query"] = forward.float(), dual.float()
        if spec.centred:
            found[f"{side}.offset"] = 3 * draw(seed + 2, H, d).float()
        if spec.quantizer == "group_vq":
            raw = draw(seed + 3, H, d // 4, 256, 4).float()
            if spec.codebook == "int8":
                found[f"{side}.codebook"], found[f"{side}.codebook_scale"] = snap_int8(raw)
            else:
                found[f"{side}.codebook"] = snap_float8(raw, spec.codebook)  # type: ignore[arg-type]
    return found


def build(k: CodecSpec, v: CodecSpec = VALUE_DEFAULT, **options: Any) -> HeadCodec:
    return HeadCodec.build(LayerPlan(layer=3, k=k, v=v), GEOMETRY, tensors(k, v), **options)


def expand(x: Tensor) -> Tensor:
    return x.repeat_interleave(HQ // H, 0)


@pytest.mark.parametrize("name", KEYS)
def test_scores_are_invariant_under_the_key_transform(name: str) -> None:
    codec = build(KEYS[name])
    k, q = draw(1, H, T, D), draw(2, HQ, 5, D)
    framed = codec.query(q) @ expand(codec.key_frame(k)).mT + codec.query_offset(q)[..., None]
    torch.testing.assert_close(framed, q @ expand(k).mT, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(codec.keys_back(codec.key_frame(k)), k, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", KEYS)
def test_scores_of_coded_rows_equal_scores_of_keys_decoded_back(name: str) -> None:
    codec = build(KEYS[name])
    r_hat = codec.decode_keys(codec.encode_keys(codec.key_frame(draw(1, H, T, D)))).double()
    q = draw(2, HQ, 5, D)
    framed = codec.query(q) @ expand(r_hat).mT + codec.query_offset(q)[..., None]
    torch.testing.assert_close(framed, q @ expand(codec.keys_back(r_hat)).mT, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("sinks", [False, True])
def test_output_is_invariant_under_the_value_frame(sinks: bool) -> None:
    codec = build(CodecSpec(), CodecSpec(transform="orthogonal", centred=True, quantizer="none"))
    v, weights = draw(3, H, T, DV), draw(4, HQ, 5, T).softmax(-1)
    mass = torch.linspace(0.2, 1.0, HQ * 5, dtype=torch.float64).reshape(HQ, 5)
    weights = weights * mass[..., None] if sinks else weights
    framed = weights @ expand(codec.decode_values(codec.encode_values(codec.value_frame(v))))
    got = codec.output(framed, mass if sinks else None)
    torch.testing.assert_close(got, weights @ expand(v), atol=1e-5, rtol=1e-5)


def test_value_rotation_folds_into_the_output_and_the_value_projection() -> None:
    codec = build(CodecSpec(), CodecSpec(transform="orthogonal", quantizer="none"))
    assert codec.v.transform is not None
    rot = codec.v.transform.double()
    v, weights, w_o = draw(3, H, T, DV), draw(4, HQ, 5, T).softmax(-1), draw(5, HQ, DV, 24)
    framed = weights @ expand(codec.value_frame(v))
    want = (codec.output(framed) @ w_o).sum(0)
    torch.testing.assert_close((framed @ (expand(rot.mT) @ w_o)).sum(0), want, atol=1e-10, rtol=1e-10)
    x, w_v = draw(6, H, T, 24), draw(7, H, 24, DV)
    torch.testing.assert_close(x @ (w_v @ rot), codec.value_frame(x @ w_v), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", [name for name, spec in KEYS.items() if spec.served])
def test_paged_rows_decode_to_the_same_rows(name: str) -> None:
    codec = build(KEYS[name])
    k = codec.encode_keys(codec.key_frame(draw(1, H, T, D)))
    v = codec.encode_values(codec.value_frame(draw(3, H, T, DV)))
    affine = affine_words(k, v)
    k_codes, v_codes, words = decode_pages(encode_pages(k.codes, v.codes, affine), T, D, DV, affine.shape[2])
    assert torch.equal(k_codes, k.codes)
    assert torch.equal(v_codes, v.codes)
    for column, part in enumerate((k.scale, k.bias, v.scale, v.bias)):
        assert torch.equal(words[..., : part.shape[-1], column], part)


@pytest.mark.parametrize("name", KEYS)
def test_decode_is_a_function_of_each_token_alone(name: str) -> None:
    codec = build(KEYS[name])
    r = codec.key_frame(draw(1, H, T, D).float())
    whole = codec.decode_keys(codec.encode_keys(r))
    single = [codec.decode_keys(codec.encode_keys(r[:, t : t + 1])) for t in range(T)]
    assert torch.equal(torch.cat(single, 1), whole)
    assert codec.encode_keys(r[:, :0]).codes.shape[1] == 0


def test_lossless_codec_keeps_the_frame_rows() -> None:
    codec = build(KEYS["lossless"])
    r = codec.key_frame(draw(1, H, T, D))
    encoded = codec.encode_keys(r)
    assert codec.decode_keys(encoded) is r
    assert encoded.scale.shape == (H, T, 0)


def test_four_bits_are_closer_than_two() -> None:
    k = draw(1, H, T, D).float()
    errors = {}
    for name in ("oscar", "four_bits"):
        codec = build(KEYS[name])
        r = codec.key_frame(k)
        encoded = codec.encode_keys(r)
        errors[encoded.codes.shape[-1]] = float((codec.decode_keys(encoded) - r).square().mean())
    assert errors[D] < errors[D // 4] / 5


@given(st.integers(0, 2**20), st.integers(-4, 4))
def test_vq_indices_ignore_the_size_of_a_centred_row(seed: int, power: int) -> None:
    codec = build(KEYS["nova"])
    r = draw(seed, H, 5, D).float()
    plain, scaled = codec.encode_keys(r), codec.encode_keys(r * 2.0**power)
    assert torch.equal(plain.codes, scaled.codes)
    assert torch.equal(scaled.scale.float(), plain.scale.float() * 2.0**power)
    assert not plain.bias.any()


def test_vq_rows_of_zeros_and_of_huge_values_stay_finite() -> None:
    codec = build(KEYS["nova"])
    r = torch.cat([torch.zeros(H, 1, D), torch.full((H, 1, D), 1e6), torch.full((H, 1, D), 1e-9)], 1)
    encoded = codec.encode_keys(r)
    decoded = codec.decode_keys(encoded)
    assert bool(decoded.isfinite().all())
    assert not decoded[:, 0].any()
    assert int(encoded.clamped) == H


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_rounds_transforms_and_rows(dtype: torch.dtype) -> None:
    k = draw(1, H, T, D).float()
    exact, cast = build(KEYS["nova"]), build(KEYS["nova"], cast=dtype)
    assert cast.k.transform is not None
    assert exact.k.transform is not None
    assert torch.equal(cast.k.transform, exact.k.transform.to(dtype).float())
    r = cast.key_frame(k)
    assert torch.equal(r, r.to(dtype).float())
    assert not torch.equal(r, exact.key_frame(k))
    torch.testing.assert_close(r, exact.key_frame(k), atol=0.2, rtol=0.05)


def test_half_precision_inputs_are_computed_in_float32() -> None:
    codec = build(KEYS["oscar"])
    k = draw(1, H, T, D).bfloat16()
    assert codec.key_frame(k).dtype == codec.query(draw(2, HQ, 1, D).half()).dtype == torch.float32
    assert codec.query_offset(draw(2, HQ, 3, D).half()).dtype == torch.float32


def test_single_queries_keep_their_shape() -> None:
    codec = build(KEYS["nova"])
    q = draw(2, HQ, D)
    assert codec.query(q).shape == (HQ, D)
    assert codec.query_offset(q).shape == (HQ,)
    torch.testing.assert_close(codec.query(q), codec.query(q[:, None])[:, 0])
    centred = build(CodecSpec(), CodecSpec(centred=True))
    assert centred.output(draw(3, HQ, DV)).shape == (HQ, DV)


def test_a_value_metric_uses_its_own_dual() -> None:
    v = CodecSpec(transform="metric", quantizer="group_vq", codebook="int8")
    codec = build(CodecSpec(), v)
    x = draw(3, H, T, DV)
    torch.testing.assert_close(codec.values_back(codec.value_frame(x)), x, atol=1e-4, rtol=1e-4)


def test_layer_roles_select_one_layer() -> None:
    assert layer_roles({"layers.1.k.offset": 1, "layers.11.k.offset": 2, "x": 3}, 1) == {"k.offset": 1}


def test_bad_tensors_are_corrupt_and_bad_plans_unsupported() -> None:
    plan = LayerPlan(layer=3, k=KEYS["nova"], v=VALUE_DEFAULT)
    good = tensors(KEYS["nova"], VALUE_DEFAULT)
    with pytest.raises(CorruptArtifactError, match=r"k\.query is missing"):
        HeadCodec.build(plan, GEOMETRY, {name: t for name, t in good.items() if name != "k.query"})
    for name in ("k.offset", "k.codebook"):
        with pytest.raises(CorruptArtifactError, match="shape"):
            HeadCodec.build(plan, GEOMETRY, good | {name: good[name][:1]})
    with pytest.raises(CorruptArtifactError, match="shape"):
        HeadCodec.build(plan, GEOMETRY, good | {"k.offset": good["k.offset"][0]})
    with pytest.raises(UnsupportedError, match="not quantized"):
        HeadCodec.build(LayerPlan(layer=3, reason="skipped by the recipe"), GEOMETRY, {})
    for spec in (
        CodecSpec(groups=5),
        CodecSpec(quantizer="group_vq", codebook="int8", clip=0.9),
    ):
        with pytest.raises(UnsupportedError):
            build(spec)


@pytest.mark.parametrize("name", sorted(KEYS))
@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_codes_of_a_token_do_not_depend_on_its_neighbours(name: str, cast: torch.dtype | None) -> None:
    spec = KEYS[name]
    plan = LayerPlan(layer=3, k=spec, v=VALUE_DEFAULT)
    codec = HeadCodec.build(plan, GEOMETRY, tensors(spec, VALUE_DEFAULT), cast=cast)
    k = draw(11, H, T, D).float()
    whole = codec.encode_keys(codec.key_frame(k))
    for t in range(T):
        alone = codec.encode_keys(codec.key_frame(k[:, t : t + 1]))
        assert torch.equal(alone.codes, whole.codes[:, t : t + 1])
        assert torch.equal(alone.scale, whole.scale[:, t : t + 1])
