"""Honest bits: what the bundle states equals the bytes that a cache of this bundle really allocates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvcq.artifacts.bundle import open_bundle
from kvcq.codecs.encoded import affine_words
from kvcq.codecs.packing import decode_pages, encode_pages
from kvcq.codecs.pair import HeadCodec, layer_roles
from tests.chain import World, make_world

RING_SLACK = 64


@pytest.fixture(scope="module", params=[64, 128])
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(
        tmp_path_factory.mktemp("bits") / str(request.param),
        ("oscar-centered", "nova"),
        head_dim=request.param,
        num_hidden_layers=2,
        max_position_embeddings=1024,
        collecting={"num_tokens": 1536, "seq_len": 256},
    )


@pytest.mark.parametrize("method", ["oscar-centered", "nova"])
def test_stated_bits_equal_allocated_bytes(wide: World, tmp_path: Path, method: str) -> None:
    bundle = open_bundle(wide.pack(method, tmp_path / "it.kvcq"))
    manifest = bundle.manifest
    geometry = {layer.layer: layer for layer in manifest.geometry.layers}
    windows = manifest.recipe.windows
    measured = [entry for entry in manifest.bits if entry.context in wide.contexts]
    assert [entry.context for entry in measured] == list(wide.contexts)
    for entry in measured:
        pages = exact = elements = 0
        for plan in manifest.plan:
            layer = geometry[plan.layer]
            codec = HeadCodec.build(plan, layer, layer_roles(bundle.tensors, plan.layer))
            rows = torch.randn(2, layer.kv_heads, entry.context, layer.d_k, generator=torch.Generator().manual_seed(1))
            k, v = codec.encode_keys(codec.key_frame(rows[0])), codec.encode_values(codec.value_frame(rows[1]))
            words = affine_words(k, v)
            allocated = encode_pages(k.codes, v.codes, words)
            back = decode_pages(allocated, entry.context, layer.d_k, layer.d_v, words.shape[-2])
            assert torch.equal(back[0], k.codes) and torch.equal(back[1], v.codes) and torch.equal(back[2], words)
            window_rows = windows.sink + windows.recent + RING_SLACK
            window = torch.empty(layer.kv_heads, window_rows, layer.d_k + layer.d_v, dtype=torch.bfloat16)
            pages += allocated.nbytes
            exact += window.nbytes
            elements += layer.kv_heads * entry.context * (layer.d_k + layer.d_v)
        assert entry.total == pytest.approx(8 * (pages + exact) / elements, rel=1e-12)
        assert entry.windows == pytest.approx(8 * exact / elements, rel=1e-12)
        assert entry.codes + entry.metadata == pytest.approx(8 * pages / elements, rel=1e-12)
    constants = sum(array.nbytes for array in bundle.tensors.values())
    assert manifest.constants_bytes == constants


def test_long_contexts_approach_the_rate_of_the_codes(wide: World) -> None:
    bundle = open_bundle(wide.pack("nova", wide.folder / "long.kvcq"))
    d = bundle.manifest.geometry.layers[0].d_k
    rate = 2 + 8 * 8 / (2 * d)
    totals = [entry.total for entry in bundle.manifest.bits]
    assert totals == sorted(totals, reverse=True)
    assert bundle.manifest.bits[-1].context == 131072
    assert rate < totals[-1] < rate + 0.02
    assert bundle.row.bytes_per_token == 2 * 2 * rate * 2 * d / 8
