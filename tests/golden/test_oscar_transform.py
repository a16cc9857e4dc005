"""OSCAR by hand: bit reversal, spectrum and composed rotation."""

import torch

from kvcq.transforms.permutation import bit_reversal, spread_order
from kvcq.transforms.spectral import compose_oscar, eigh_sorted
from tests.golden.reference import HQ, D, T, close, golden, keys, queries, query_moment, values

WANT = golden()["oscar_fit"]


def test_permutation() -> None:
    assert bit_reversal(D).tolist() == golden()["bitrev"]
    assert spread_order(D).tolist() == golden()["perm_ascending_eigs"]


def test_query_moment_and_its_spectrum() -> None:
    moment = query_moment()
    close(moment[0, 0], WANT["CQ_row0"])
    close(eigh_sorted(moment)[0][0], WANT["CQ_eigs"], 1e-12)


def test_value_target_spectra() -> None:
    k, v = keys()[0], values()[0]
    weight = ((k @ query_moment()[0]) * k).sum(1)
    weight = weight * T / weight.sum()
    close(weight, WANT["w_norm"], 1e-12)
    close(eigh_sorted(((v * weight[:, None]).T @ v / T)[None])[0][0], WANT["CS_code_eigs"], 1e-12)
    logits = queries() @ k.T / D**0.5
    scores = logits.masked_fill(~torch.ones(T, T).tril().bool(), -torch.inf).softmax(-1)
    outputs = (scores @ v).flatten(0, 1)
    close(eigh_sorted((outputs.T @ outputs / (T * HQ))[None])[0][0], WANT["CS_paper_eigs"], 1e-12)


def test_rotation_is_orthogonal_and_flattens_the_moment() -> None:
    moment = query_moment()
    rotation = compose_oscar(eigh_sorted(moment)[1])
    close(rotation[0], WANT["R_k"], 1e-10)
    close(rotation[0, 0], WANT["R_k_signfixed_row0"], 1e-10)
    close(rotation[0].T @ rotation[0], torch.eye(D), 1e-12)
    close((rotation[0].T @ moment[0] @ rotation[0]).diagonal(), torch.full((D,), WANT["CQ_trace"] / D), 1e-12)
