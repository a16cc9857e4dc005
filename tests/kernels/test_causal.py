"""Prompts that begin: a library's causal attention, in lengths that it has plans for."""

from __future__ import annotations

import warnings
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch

from kvcq.kernels import causal
from kvcq.kernels.causal import attend_causal, prepare


def exact(q, k, v, scaling):
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    products = (scaling * q @ k.mT).masked_fill(torch.ones(q.shape[1], q.shape[1], device=q.device).triu(1) > 0, -1e300)
    return (products.softmax(-1) @ v).transpose(0, 1)


def error(lengths, dtype, device, heads=(4, 2), d=32):
    """Return the relative error over several prompts, queries and keys as views of one projection."""
    fused = torch.randn(sum(lengths) + 5, (heads[0] + 2 * heads[1]) * d, generator=torch.Generator().manual_seed(0))
    parts = fused.to(device, dtype).split([heads[0] * d, heads[1] * d, heads[1] * d], -1)
    q, k, v = (x.unflatten(-1, (-1, d)) for x in parts)
    out = torch.full(q.shape, 7.0, dtype=dtype, device=device)
    ends = list(accumulate(lengths, initial=0))
    attend_causal(q, k, v, list(pairwise(ends)), 0.3, out)
    assert (out[sum(lengths) :] == 7).all()
    wanted = [exact(*part, 0.3) for part in zip(*(x[: sum(lengths)].split(lengths) for x in (q, k, v)), strict=True)]
    wanted = torch.cat(wanted)
    return float((out[: sum(lengths)].double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("lengths", [(16,), (1, 16, 33), (5, 31)])
def test_prompts_of_any_length_see_themselves_only(monkeypatch, lengths):
    monkeypatch.setattr(causal, "STEP", 16)
    assert error(list(lengths), torch.float32, torch.device("cpu")) < 1e-6


def test_without_a_gpu_there_is_no_library():
    assert not prepare((4, 2), (32, 32), torch.float32, torch.device("cpu"), 8192)


@pytest.mark.parametrize(("dims", "longest"), [((128, 64), 8192), ((192, 192), 8192), ((128, 128), causal.LEAST - 1)])
def test_what_the_library_is_not_for_reaches_no_device(dims, longest):
    assert not prepare((4, 2), dims, torch.bfloat16, SimpleNamespace(type="none like this"), longest)


@pytest.mark.gpu
def test_cudnn_is_right_and_takes_no_notice_of_what_is_beside():
    device = torch.device("cuda")
    if torch.cuda.get_device_capability()[0] != causal.HOPPER:
        pytest.skip("cuDNN is asked on Hopper")
    for d, heads in ((64, (14, 2)), (128, (32, 8)), (128, (8, 8))):
        assert prepare(heads, (d, d), torch.bfloat16, device, 4096)
        assert error([2048, 2500, 4096], torch.bfloat16, device, heads, d) < 4e-3
        q, k, v = torch.randn(8192, sum(heads) + heads[1], d, device=device).bfloat16().split([*heads, heads[1]], 1)
        alone, beside = torch.empty_like(q), torch.empty_like(q)
        attend_causal(q, k, v, [(0, 3000)], 0.3, alone)
        attend_causal(q, k, v, [(0, 3000), (3000, 5100), (5100, 8192)], 0.3, beside)
        assert torch.equal(alone[:3000], beside[:3000])
    # Not its dtype: refused without a word, whatever warnings are.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not prepare((8, 8), (128, 128), torch.float32, device, 4096)
