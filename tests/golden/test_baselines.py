"""By hand: KIVI, Kitty, SAW-INT4 and TurboQuant on the perturbed keys of the worked example."""

import pytest
import torch
from torch import Tensor

from kvcq.codecs.levels import gaussian_levels
from kvcq.codecs.side import SideCodec
from kvcq.codecs.token_group import promoted, token_group_hat
from kvcq.codecs.uniform import encode_uniform
from kvcq.spec.codec import CodecSpec, Metadata
from kvcq.transforms.hadamard import block_hadamard, hadamard
from tests.golden.reference import close, golden

K = torch.tensor(golden()["quarot_tokens"]["k"], dtype=torch.float32)[None]


def grouped(metadata: Metadata, share: float = 0.0) -> CodecSpec:
    return CodecSpec(quantizer="token_group", group_tokens=4, metadata=metadata, promoted=share)


@pytest.mark.parametrize(("metadata", "atol"), [("fp32-zero", 1e-6), ("fp16-bias", 2e-3)])
def test_kivi_keys_by_channel(metadata: Metadata, atol: float) -> None:
    want = golden()["kivi_k_group4"]
    codes, scale, _, _ = encode_uniform(K.mT.contiguous(), 1, 2, metadata)
    assert codes[0].T.tolist() == want["codes"]
    close(scale.flatten(), want["scale"], atol)
    hat = token_group_hat(K, 0, grouped(metadata))
    close(hat[0], want["dequant"], atol)
    close((hat - K).square().mean(), want["mse"], atol / 10)


def test_kivi_values_by_token() -> None:
    want = golden()["kivi_v_group8"]
    v = torch.tensor(want["v"], dtype=torch.float32)[None]
    codec = SideCodec.build("v", CodecSpec(), (1, 8), {})
    coded = codec.encode(v)
    close(coded.scale.flatten(), want["scale"], 1e-3)
    close(coded.bias.flatten(), want["mn"], 1e-3)
    assert encode_uniform(v, 1)[0][0].tolist() == want["codes"]
    close(codec.decode(coded)[0], want["dequant"], 2e-3)


@pytest.mark.parametrize(("metadata", "atol"), [("fp32-zero", 1e-6), ("fp16-bias", 2e-3)])
def test_kitty_promotes_the_strongest_channels(metadata: Metadata, atol: float) -> None:
    want = golden()["kitty_k"]
    close(K[0].abs().mean(0), want["mean_abs"])
    assert sorted(promoted(K[:, None], 2).flatten().tolist()) == want["promoted"]
    fine = encode_uniform(K.mT.contiguous(), 1, 4, metadata)
    coarse = encode_uniform(K.mT.contiguous(), 1, 2, metadata)
    codes, scale = coarse[0][0].T.clone(), coarse[1].flatten().float()
    for channel in want["promoted"]:
        codes[:, channel], scale[channel] = fine[0][0, channel], fine[1].flatten()[channel]
    assert codes.tolist() == want["codes"]
    close(scale, want["scale"], atol)
    close((token_group_hat(K, 0, grouped(metadata, 0.25)) - K).square().mean(), want["mse"], atol / 10)


@pytest.mark.parametrize(("metadata", "atol"), [("fp32-zero", 1e-6), ("fp16-bias", 2e-3)])
def test_saw_int4_with_blocks_of_four(metadata: Metadata, atol: float) -> None:
    want = golden()["saw4_order4_row0"]
    spec = CodecSpec(transform="orthogonal", bits=4, metadata=metadata)
    codec = SideCodec.build("k", spec, (1, 8), {"k.transform": block_hadamard(8, 4)[None]})
    r = codec.frame(K[:, :1])
    close(r.flatten(), want["rot"], 1e-6)
    coded = codec.encode(r)
    assert coded.codes.flatten().tolist() == want["codes"]
    close(coded.scale.flatten(), [want["scale"]], 1e-4)
    close(codec.back(codec.decode(coded)).flatten(), want["x_hat"], atol)


def test_turboquant_with_a_hadamard_rotation() -> None:
    want = golden()["turbo3_PiH"]
    levels = torch.tensor(gaussian_levels(3), dtype=torch.float64) / 8**0.5
    spec = CodecSpec(transform="orthogonal", quantizer="levels", unit="norm", bits=3)
    codec = SideCodec.build("k", spec, (1, 8), {"k.transform": hadamard(8)[None], "k.levels": levels[None]})
    k: Tensor = K[:, :1]
    coded = codec.encode(codec.frame(k))
    assert float(coded.scale) == want["norm_f16"]
    assert coded.codes.flatten().tolist() == want["codes"]
    hat = codec.back(codec.decode(coded))
    # The worked example takes the levels to three decimals.
    close(hat.flatten(), want["x_hat"], 2e-3)
    close((hat - k).norm() / k.norm(), want["rel_err"], 1e-4)


def test_levels_of_a_normal_distribution() -> None:
    close(gaussian_levels(1), [-((2 / torch.pi) ** 0.5), (2 / torch.pi) ** 0.5], 1e-15)
    close(gaussian_levels(2)[2:], [0.45278, 1.51042], 1e-5)
    close(gaussian_levels(3)[4:], [0.24509, 0.75601, 1.34391, 2.15195], 1e-5)
