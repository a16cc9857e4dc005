"""Codecs of un-rotated keys: what they lose does not depend on the position."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvcq.codecs.pair import HeadCodec
from kvcq.codecs.side import SideCodec
from kvcq.errors import UnsupportedError
from kvcq.runtime.codecs import rotation_of, served_codecs
from kvcq.spec.codec import CodecSpec
from kvcq.spec.plan import LayerPlan
from kvcq.stats.rotary import rotate
from tests.codecs.test_pair import draw, rotation
from tests.stats.examples import layer, model, rope

H, D = 2, 32
ROPE = rope(rotary=16, offset=8)
GEOMETRY = layer(d_k=D, d_v=D)
SPECS = {
    "uniform": CodecSpec(pre_rope=True, transform="orthogonal"),
    "groups": CodecSpec(pre_rope=True, groups=4),
    "reordered": CodecSpec(pre_rope=True, transform="orthogonal", groups=4, reordered=True),
    "channel": CodecSpec(pre_rope=True, quantizer="levels", unit="channel", outliers=0.1),
}


def tensors(spec: CodecSpec) -> dict[str, Any]:
    found: dict[str, Any] = {"k.transform": rotation(0, D)} if spec.transform == "orthogonal" else {}
    if spec.reordered:
        found["k.order"] = torch.randperm(H * D, generator=torch.Generator().manual_seed(0)).reshape(H, D).int()
    if spec.quantizer == "levels":
        found["k.levels"] = torch.tensor([[-0.9, -0.3, 0.2, 0.8]] * H)
        found["k.bounds"] = torch.tensor([-1.5, 1.2]).expand(H, D, 2)
    return found


def build(name: str) -> HeadCodec:
    plan = LayerPlan(layer=0, k=SPECS[name], v=CodecSpec())
    return HeadCodec.build(plan, GEOMETRY, tensors(SPECS[name]), rotation=rotation_of(ROPE))


def hat_of_unrotated(name: str, k0: Tensor, positions: Tensor) -> Tensor:
    hat = build(name).keys_hat(rotate(k0, positions, ROPE).float(), positions)
    return rotate(hat.double(), positions, ROPE, inverse=True)


@pytest.mark.parametrize("name", SPECS)
def test_a_shift_of_all_positions_turns_what_is_read_back(name: str) -> None:
    k0 = draw(1, H, 50, D)
    here, there = (hat_of_unrotated(name, k0, start + torch.arange(50)) for start in (0, 777))
    # A value on the border of two codes may fall either way once the turn has rounded it.
    assert ((here - there).abs() < 1e-4).double().mean() > 0.998


@pytest.mark.parametrize("name", SPECS)
def test_it_is_the_codec_of_the_row_before_rope(name: str) -> None:
    spec = SPECS[name].model_copy(update={"pre_rope": False})
    plain = HeadCodec.build(LayerPlan(layer=0, k=spec, v=CodecSpec()), GEOMETRY, tensors(spec))
    k0, positions = draw(2, H, 50, D), torch.arange(9, 59)
    want = plain.keys_back(plain.keys_hat(plain.key_frame(k0.float()), positions))
    assert ((hat_of_unrotated(name, k0, positions) - want).abs() < 1e-4).double().mean() > 0.998


def test_reordered_channels_of_all_heads_share_scales() -> None:
    """The plain order is grouping within heads; any other is grouping of the ordered token."""
    spec = CodecSpec(groups=4, reordered=True)
    x, positions = draw(6, H, 7, D).float(), torch.arange(7)
    natural = SideCodec.build("k", spec, (H, D), {"k.order": torch.arange(H * D).reshape(H, D)})
    grouped = SideCodec.build("k", CodecSpec(groups=4), (H, D), {})
    assert torch.equal(natural.hat(x, positions), grouped.hat(x, positions))
    order = torch.randperm(H * D, generator=torch.Generator().manual_seed(1))
    mixed = SideCodec.build("k", spec, (H, D), {"k.order": order.reshape(H, D)})
    token = x.transpose(0, 1).flatten(1)[:, order]
    hat = mixed.hat(x, positions).transpose(0, 1).flatten(1)[:, order]
    width = token.unflatten(1, (8, 8)).aminmax(dim=-1, keepdim=True)
    assert ((hat - token).unflatten(1, (8, 8)).abs() <= (width.max - width.min) / 6 + 5e-3).all()
    with pytest.raises(UnsupportedError, match="scales across heads"):
        mixed.encode(x)


def test_the_stored_frame_is_that_of_the_cache() -> None:
    codec, k = build("uniform"), draw(3, H, 5, D).float()
    assert torch.equal(codec.key_frame(k), k)
    assert torch.equal(codec.query(k), k) and (codec.query_offset(k) == 0).all()
    with pytest.raises(UnsupportedError, match="codes keys before RoPE"):
        codec.encode_keys(k)


def test_a_row_reads_back_alike_alone_and_in_company() -> None:
    codec, k, positions = build("uniform"), draw(4, H, 20, D).float(), torch.arange(100, 120)
    whole = codec.keys_hat(k, positions)
    for t in range(20):
        assert torch.equal(codec.keys_hat(k[:, t : t + 1], positions[t : t + 1]), whole[:, t : t + 1])


def test_codecs_of_an_artifact_turn_by_the_rope_of_their_layer() -> None:
    geometry = model(layer(0, d_k=D, d_v=D), layer(1, d_k=D, d_v=D, rope=None), ropes=(ROPE,))
    plan = [LayerPlan(layer=i, k=SPECS["groups"], v=CodecSpec()) for i in (0, 1)]
    codecs = served_codecs(plan, geometry, {}, "cpu")
    k, positions = draw(5, H, 6, D).bfloat16().float(), torch.arange(3, 9)
    assert torch.equal(codecs[0].keys_hat(k, positions), build("groups").keys_hat(k, positions))
    plain = HeadCodec.build(LayerPlan(layer=1, k=CodecSpec(groups=4), v=CodecSpec()), GEOMETRY, {})
    assert torch.equal(codecs[1].keys_hat(k, positions), plain.keys_hat(k, positions))
