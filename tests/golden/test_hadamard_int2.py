"""By hand: Hadamard rotation with INT2 and naive INT2."""

import torch

from kvcq.codecs.pair import HeadCodec
from kvcq.spec.codec import CodecSpec
from kvcq.spec.geometry import LayerGeometry
from kvcq.spec.plan import LayerPlan
from kvcq.transforms.hadamard import hadamard
from tests.golden.reference import close, golden

WANT = golden()["quarot_tokens"]
GEOMETRY = LayerGeometry(layer=0, kind="full", q_heads=1, kv_heads=1, d_k=8, d_v=8)
K = torch.tensor(WANT["k"], dtype=torch.float32)[None]


def build(transform: str) -> HeadCodec:
    spec = CodecSpec(transform=transform, metadata="fp32-zero")
    return HeadCodec.build(
        LayerPlan(layer=0, k=spec, v=spec),
        GEOMETRY,
        {"k.transform": hadamard(8)[None], "v.transform": hadamard(8)[None]},
    )


def test_rotated_rows_codes_and_logits() -> None:
    codec = build("orthogonal")
    r = codec.key_frame(K)
    close(r[0], WANT["k_rot"], 1e-6)
    encoded = codec.encode_keys(r)
    assert encoded.codes[0].tolist() == [row["bytes"] for row in WANT["rows"]]
    close(encoded.scale.flatten(), [row["scale"] for row in WANT["rows"]], 1e-6)
    close(encoded.bias.flatten(), [row["zero"] for row in WANT["rows"]], 1e-5)
    r_hat = codec.decode_keys(encoded)
    k_hat = codec.keys_back(r_hat)
    close(k_hat[0], WANT["k_hat"], 2e-6)
    close((k_hat - K).square().mean(), WANT["k_mse"], 1e-7)
    q = torch.tensor(WANT["q"])[None, None]
    logits = codec.query(q) @ r_hat.mT
    close(codec.query(q) @ r.mT, torch.tensor(WANT["logits_exact"]).reshape(1, 1, -1), 1e-6)
    close(logits.flatten(), WANT["logits_quant"], 3e-6)
    close((logits.flatten() - torch.tensor(WANT["logits_exact"])).square().mean(), WANT["qk_mse"], 1e-5)


def test_naive_row() -> None:
    want = golden()["naive_int2_row0"]
    encoded = build("identity").encode_keys(K[:, :1])
    close(torch.stack([encoded.scale, encoded.bias]).flatten(), [want["scale"], want["zero"]], 1e-6)
    close(build("identity").decode_keys(encoded).flatten(), want["dequant"], 1e-6)
