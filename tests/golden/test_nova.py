"""NOVA-KV by hand: the attention metric, the toy codebooks, sinks and the fp8 snap."""

from typing import Any

import pytest
import torch

from kvcq.codecs.codebook import snap_float8
from kvcq.codecs.pair import HeadCodec
from kvcq.spec.codec import CodecSpec, Metadata
from kvcq.spec.geometry import LayerGeometry
from kvcq.spec.plan import LayerPlan
from kvcq.transforms.metric import nova_transform
from kvcq.transforms.permutation import partition
from tests.golden.reference import HQ, D, T, close, golden, key_moments, keys, queries, query_moment

WANT: dict[str, Any] = golden()["nova"]
SM = D**-0.5
PERM = partition("deal", D)


def build(metadata: Metadata) -> HeadCodec:
    mu, cov = key_moments()
    forward, dual, _ = nova_transform(HQ * query_moment(), cov)
    return HeadCodec.build(
        LayerPlan(
            layer=0,
            k=CodecSpec(transform="metric", centred=True, quantizer="group_vq", codebook="e5m2", metadata=metadata),
            v=CodecSpec(),
        ),
        LayerGeometry(layer=0, kind="full", q_heads=HQ, kv_heads=1, d_k=D, d_v=D),
        {
            "k.transform": forward[..., PERM],
            "k.query": dual[..., PERM],
            "k.offset": mu,
            "k.codebook": torch.tensor(WANT["codebooks"], dtype=torch.float16)[None],
        },
    )


def test_transform_and_its_identities() -> None:
    mu, cov = key_moments()
    moment = HQ * query_moment()
    forward, dual, variances = nova_transform(moment, cov)
    assert PERM.tolist() == WANT["perm"]
    close(mu[0], WANT["mean_k"])
    close(moment[0, 0], WANT["Mq_row0"])
    close(variances[0], WANT["sigma2_desc"], 1e-11)
    close(forward[0, 0, PERM], WANT["F_row0_signfixed_permuted"], 1e-10)
    close(forward[0] @ forward[0].T, moment[0], 1e-12)
    close(dual[0].T @ forward[0], torch.eye(D), 1e-12)
    rows = (keys() - mu[:, None]) @ forward
    close(rows[0].var(0, correction=0), variances[0], 1e-11)
    close(variances[0, PERM].log().reshape(2, 4).sum(1), WANT["group_log_volumes"], 1e-9)
    close(variances[0].log().reshape(2, 4).sum(1), WANT["sorted_group_log_volumes"], 1e-9)


@pytest.mark.parametrize(("metadata", "atol"), [("fp32-zero", 2e-6), ("fp16-bias", 2e-3)])
def test_codes_rows_and_logits(metadata: Metadata, atol: float) -> None:
    codec = build(metadata)
    k, q = keys(), queries()[:, 5:6]
    r = codec.key_frame(k)
    close(r[0, 0], WANT["r0"], 1e-6)
    encoded = codec.encode_keys(r)
    assert encoded.codes[0, :6].tolist() == WANT["idx_first6"]
    close(encoded.scale[0, :4, 0], WANT["rho_first4"], atol)
    r_hat = codec.decode_keys(encoded)
    close(r_hat[0, 0], WANT["r_hat0"], atol)
    k_hat = codec.keys_back(r_hat)
    close(k_hat[0, 0], WANT["k_hat0"], atol)
    mapped = codec.query(q)
    close(mapped[0, 0], WANT["q_mapped"], 1e-6)
    close(codec.query_offset(q)[0, 0], WANT["q_dot_mu"], 1e-7)
    close(mapped[0] @ r[0, :4].T, [WANT["logits_exact_minus_qmu"]], 1e-6)
    close(mapped[0, 0].float() @ r_hat[0, :4].T, WANT["logits_hat_no_mean"], 4 * atol)
    close(q[0, 0].float() @ k_hat[0, :4].T, WANT["logits_hat_from_k_hat"], 4 * atol)


def test_row_error_is_the_summed_logit_error_of_the_group() -> None:
    codec = build("fp32-zero")
    r = codec.key_frame(keys())
    r_hat = codec.decode_keys(codec.encode_keys(r)).double()
    error = keys() - codec.keys_back(r_hat)
    close((r - r_hat).square().sum(), WANT["parseval_rhs_Mq"], 1e-4)
    close((queries() @ error[0].T).square().sum() / T, WANT["parseval_rhs_Mq"], 1e-4)


def test_sink_logit_needs_the_offset_and_plain_softmax_does_not() -> None:
    codec = build("fp32-zero")
    q = queries()[:, 5:6]
    r_hat = codec.decode_keys(codec.encode_keys(codec.key_frame(keys())))[0, :4].double()
    logits = SM * (codec.query(q)[0, 0] @ r_hat.T)
    shift = SM * codec.query_offset(q)[0]
    sink = torch.tensor([0.3], dtype=torch.float64)
    close(torch.cat([logits, sink - shift]).softmax(0), WANT["sink_probs_ref"], 1e-6)
    close(torch.cat([logits, sink]).softmax(0), WANT["sink_probs_uncorrected"], 1e-6)
    exact = (SM * (q[0, 0] @ keys()[0, :4].T)).log_softmax(0)
    want = golden()["kl_nova_4tok"]
    close(exact.exp(), want["p"], 1e-9)
    close((exact.exp() * (exact - logits.log_softmax(0))).sum(), want["kl"], 1e-6)


@pytest.mark.parametrize("name", ["e5m2", "e4m3"])
def test_float8_snap_without_scale(name: str) -> None:
    raw = torch.tensor(WANT["raw_cb_group0"])
    snapped = snap_float8(raw, name)  # type: ignore[arg-type]
    want = WANT[f"fp8_{name}"]
    close(snapped, want["direct_unscaled"])
    close((snapped.double() - raw).norm() / raw.norm(), want["rel_direct"], 1e-6)
