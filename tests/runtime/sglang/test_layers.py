"""Ranks hold whole heads, and compute with them what one rank computes with all."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from kvcq.codecs.pair import HeadCodec
from kvcq.errors import UnsupportedError
from kvcq.kernels.arrays import Tables
from kvcq.kernels.query import map_queries
from kvcq.runtime.sglang.layers import layer_tables, shard
from kvcq.spec.geometry import LayerGeometry, ModelGeometry
from kvcq.spec.plan import LayerPlan
from tests.runtime.hf.setup import INT2, VQ, random_tensors

CPU = torch.device("cpu")


def geometry_of(layers=2, **changes):
    plain = {"kind": "full", "q_heads": 8, "kv_heads": 4, "d_k": 32, "d_v": 32}
    made = tuple(LayerGeometry(layer=number, **plain | changes) for number in range(layers))
    return ModelGeometry(model_type="tiny", hidden_size=64, vocab_size=128, layers=made)


def tensors_of(geometry, k, v):
    found = {}
    for layer in geometry.layers:
        for role, tensor in random_tensors(layer, k, v).items():
            found[f"layers.{layer.layer}.{role}"] = tensor
    return found


@pytest.mark.parametrize("k", [INT2, VQ])
def test_a_rank_holds_the_constants_of_its_heads(k):
    geometry = geometry_of()
    plan = [LayerPlan(layer=number, k=k, v=INT2) for number in range(2)]
    tensors = tensors_of(geometry, k, INT2)

    def of(tp, rank, only=None):
        options = {"tp": tp, "rank": rank, "dtype": torch.float32, "device": CPU, "only": only}
        return layer_tables(plan, geometry, tensors, **options)

    whole = of(1, 0)
    assert list(whole) == [0, 1] and list(of(1, 0, only={1})) == [1]
    for rank in range(2):
        part = of(2, rank)[1]
        assert part.heads == 2 and part.block_bytes == whole[1].block_bytes
        cut = slice(2 * rank, 2 * rank + 2)
        for name in ("map", "shift", "dual", "offset"):
            for mine, all_of_them in ((part.k, whole[1].k), (part.v, whole[1].v)):
                assert torch.equal(getattr(mine, name), getattr(all_of_them, name)[cut])
        if k is VQ:
            assert torch.equal(part.search, whole[1].search[cut])
            assert torch.equal(part.codebook_scale, whole[1].codebook_scale[cut])
    repeated = [of(8, rank)[0] for rank in range(8)]
    assert all(torch.equal(layer.k.map[0], whole[0].k.map[rank // 2]) for rank, layer in enumerate(repeated))


def test_a_shard_frees_what_it_does_not_hold():
    geometry = geometry_of(1)
    codec = HeadCodec.build(
        LayerPlan(layer=0, k=VQ, v=INT2), geometry.layers[0], random_tensors(geometry.layers[0], VQ, INT2)
    )
    tables = Tables.of(codec, 4, 32, 32, torch.float32, CPU)
    part = shard(tables, range(1, 2))
    for side, whole in ((part.k, tables.k), (part.v, tables.v)):
        for field in fields(side):
            value = getattr(side, field.name)
            if isinstance(value, torch.Tensor):
                assert value.untyped_storage().nbytes() == value.nbytes < getattr(whole, field.name).nbytes
    if not torch.cuda.is_available():
        q = torch.randn(3, 8, 32)
        all_mapped, own = torch.empty_like(q), torch.empty(3, 2, 32)
        map_queries(tables, q, all_mapped, None)
        map_queries(part, q[:, 2:4].contiguous(), own, None)
        torch.testing.assert_close(own, all_mapped[:, 2:4])


def test_layers_without_pages_are_refused_by_number():
    geometry = geometry_of()
    options = {"tp": 1, "rank": 0, "dtype": torch.float32, "device": CPU}
    plan = [LayerPlan(layer=0, k=INT2, v=INT2), LayerPlan(layer=1, reason="its keys are wild")]
    with pytest.raises(UnsupportedError, match=r"BF16 \(its keys are wild\).*layer 1"):
        layer_tables(plan, geometry, tensors_of(geometry, INT2, INT2), **options)
    with pytest.raises(UnsupportedError, match="no codec for this full layer"):
        layer_tables(plan[:1], geometry, tensors_of(geometry, INT2, INT2), **options)
    odd = geometry_of(d_k=40, d_v=40)
    plan = [LayerPlan(layer=number, k=INT2, v=INT2) for number in range(2)]
    with pytest.raises(UnsupportedError, match=r"head dim 40.*layer 0.*: serve this bundle with --engine hf"):
        layer_tables(plan, odd, tensors_of(odd, INT2, INT2), **options)
