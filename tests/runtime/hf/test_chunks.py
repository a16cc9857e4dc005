from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcq.codecs.encoded import affine_words
from kvcq.codecs.packing import encode_pages
from kvcq.codecs.pair import HeadCodec
from kvcq.codecs.windows import oldest_served
from kvcq.errors import UnsupportedError
from kvcq.models.geometry import plan_geometry
from kvcq.runtime.codecs import rotation_of
from kvcq.runtime.hf.cache import Host
from kvcq.runtime.hf.rows import PackedRows, Shape, SimulatedRows
from kvcq.runtime.hf.semantics import ByQuery, Deferred, Served
from kvcq.spec.boundary import Boundary
from kvcq.spec.codec import CodecSpec
from kvcq.spec.geometry import LayerGeometry
from kvcq.spec.plan import LayerPlan, Windows
from tests.runtime.hf.setup import (
    INT2,
    PAIRS,
    WINDOWS,
    codec_of,
    codecs_of,
    double,
    host_of,
    one_pass,
    random_tensors,
    relative,
    run,
    window_mask,
)
from tests.tiny import tiny_tokens

LAYER = LayerGeometry(layer=0, kind="full", q_heads=4, kv_heads=2, d_k=32, d_v=32)
CHUNKS = (1, 7, 256, None)


def frame_rows(codec, tokens, layer=LAYER, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys, values = (3 * torch.randn(layer.kv_heads, tokens, d, generator=generator) for d in (layer.d_k, layer.d_v))
    return codec.key_frame(keys), codec.value_frame(values)


def stored(kind, codec, rows, sizes, windows=WINDOWS, layer=LAYER):
    shape = Shape(layer.kv_heads, layer.d_k, layer.d_v, rows[0].device, codec.k.cast or torch.float32)
    request = kind(codec, windows, shape)
    for keys, values in zip(rows[0].split(sizes, 1), rows[1].split(sizes, 1), strict=True):
        request.append(keys, values)
    return request


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_pages_do_not_depend_on_how_rows_arrive(pair, cast):
    codec = codec_of(LAYER, *PAIRS[pair], cast=cast)
    rows = frame_rows(codec, 300)
    bulk = stored(PackedRows, codec, rows, 300)
    k, v = codec.encode_keys(rows[0]), codec.encode_values(rows[1])
    assert torch.equal(bulk.pages, encode_pages(k.codes, v.codes, affine_words(k, v)))
    for size in CHUNKS[:-1]:
        request = stored(PackedRows, codec, rows, size)
        assert all(torch.equal(a, b) for a, b in zip(bulk.tensors(), request.tensors(), strict=True)), size


@pytest.mark.parametrize("pair", PAIRS)
def test_packed_and_simulated_rows_are_the_same_bits(pair):
    codec = codec_of(LAYER, *PAIRS[pair], cast=torch.bfloat16)
    rows = frame_rows(codec, 150)
    packed, simulated = (stored(kind, codec, rows, 13) for kind in (PackedRows, SimulatedRows))
    for span in ((3, 150), (10, 77), (64, 128), (100, 101)):
        assert all(torch.equal(a, b) for a, b in zip(packed.decoded(*span), simulated.decoded(*span), strict=True))
    for span in ((0, 3), (90, 150), (149, 150)):
        assert all(torch.equal(a, b) for a, b in zip(packed.exact(*span), simulated.exact(*span), strict=True))


@settings(max_examples=20)
@given(cuts=st.lists(st.integers(1, 149), max_size=4, unique=True), taken=st.integers(0, 60))
def test_rows_taken_back_and_given_again_leave_no_trace(cuts, taken):
    codec = codec_of(LAYER, cast=torch.bfloat16)
    rows = frame_rows(codec, 150)
    edges = [0, *sorted(cuts), 150]
    sizes = [b - a for a, b in pairwise(edges)]
    whole = stored(PackedRows, codec, rows, sizes)
    again = whole.clone()
    again.check_crop(150 - taken)
    again.crop(150 - taken)
    assert again.length == 150 - taken and again.pages.shape[0] == -(-again.length // 64)
    again.append(rows[0][:, 150 - taken :], rows[1][:, 150 - taken :])
    assert all(torch.equal(a, b) for a, b in zip(whole.tensors(), again.tensors(), strict=True))


@pytest.mark.parametrize("windows", [WINDOWS, Windows(sink=0, recent=1), Windows(sink=5, recent=0)])
def test_the_latest_rows_are_exact_at_every_length(windows):
    codec = codec_of(LAYER, cast=torch.bfloat16)
    total = 3 * (windows.recent + 64)
    rows = frame_rows(codec, total)
    request = stored(PackedRows, codec, (rows[0][:, :0], rows[1][:, :0]), 1, windows)
    for length in range(1, total + 1):
        request.append(rows[0][:, length - 1 : length], rows[1][:, length - 1 : length])
        sinks, oldest = min(windows.sink, length), max(windows.sink, length - windows.recent)
        for span in ((0, sinks), (oldest, length)):
            if span[0] < span[1]:
                read = request.exact(*span)
                assert all(torch.equal(a.float(), b[:, slice(*span)]) for a, b in zip(read, rows, strict=True)), length


@pytest.mark.parametrize("pair", PAIRS)
def test_packed_and_simulated_models_agree_bit_for_bit(pair):
    model, tokens = double(num_hidden_layers=2).float(), tiny_tokens(90)
    logits = {}
    for mode in ("packed", "simulate"):
        with host_of(model, *PAIRS[pair], mode=mode, cast=torch.bfloat16) as host:
            logits[mode] = run(model, host.new_cache(), tokens, [70, 1, 1, 10, 8])
    assert torch.equal(logits["packed"], logits["simulate"])


def codes(cache):
    return [layer.requests[0].pages for layer in cache.quantized()]


@pytest.mark.parametrize("pair", ["int2", "vq"])
def test_by_query_no_chunk_changes_codes_or_answers(pair):
    model, tokens = double(num_hidden_layers=2), tiny_tokens(260)
    with host_of(model, *PAIRS[pair]) as host:
        caches = {chunk: host.new_cache(ByQuery()) for chunk in CHUNKS}
        logits = {chunk: run(model, cache, tokens, chunk) for chunk, cache in caches.items()}
    for chunk in CHUNKS:
        assert all(map(torch.equal, codes(caches[chunk]), codes(caches[None]))), chunk
        assert relative(logits[chunk], logits[None]) < 1e-12


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gemma3n_text"])
def test_by_query_is_what_one_pass_with_the_window_mask_computes(family):
    model, tokens = double(family), tiny_tokens(60)
    codecs = codecs_of(model)
    wanted = one_pass(model, codecs, tokens, window_mask(60))
    with host_of(model) as host:
        assert relative(run(model, host.new_cache(), tokens, [33, 1, 20, 6]), wanted) < 1e-6
    assert relative(one_pass(model, codecs, tokens, window_mask(60, oldest=torch.zeros(60))), wanted) > 1e-3


@settings(max_examples=15)
@given(data=st.data())
def test_served_replays_any_list_of_boundaries(data):
    prompt = data.draw(st.integers(2, 60))
    starts = sorted(data.draw(st.sets(st.integers(1, prompt - 1), max_size=4)))
    boundaries = tuple(Boundary(at, data.draw(st.sampled_from(["carried", "cached"]))) for at in starts)
    windows = Windows(sink=data.draw(st.integers(0, 6)), recent=data.draw(st.integers(0, 10)))
    model, tokens = double(num_hidden_layers=2), tiny_tokens(prompt + 12)
    oldest = window_mask_of(prompt, boundaries, windows, prompt + 12)
    wanted = one_pass(model, codecs_of(model), tokens, window_mask(prompt + 12, windows, oldest))
    edges = [0, *starts, prompt]
    chunks = [b - a for a, b in pairwise(edges)] + [1] * 7 + [5]
    with host_of(model, windows=windows) as host:
        found = run(model, host.new_cache(Served(prompt, boundaries)), tokens, chunks)
    assert relative(found, wanted) < 1e-9


def window_mask_of(prompt, boundaries, windows, total):
    """Bounds of the prompt by its chunks; after it the window rule, which reaches no further than the last hit."""
    decode = torch.arange(prompt, total) - windows.recent + 1
    hit = max((b.position for b in boundaries if b.kind == "cached"), default=0)
    return torch.cat([oldest_served(prompt, boundaries, windows), decode.clamp(min=hit)])


@pytest.mark.parametrize("mode", ["packed", "simulate"])
def test_served_live_and_deferred_follow_the_forwards(mode):
    model, tokens = double(num_hidden_layers=2), tiny_tokens(60)
    codecs = codecs_of(model)
    carried = tuple(Boundary(at, "carried") for at in (20, 40))
    decode = torch.arange(50, 60) - WINDOWS.recent + 1
    bounds = {
        Served(): torch.cat([oldest_served(50, carried, WINDOWS), decode]),
        Deferred(): torch.cat([torch.zeros(50, dtype=torch.long), decode]),
        Deferred(50): torch.cat([torch.zeros(50, dtype=torch.long), decode]),
    }
    with host_of(model, mode=mode) as host:
        for semantics, oldest in bounds.items():
            wanted = one_pass(model, codecs, tokens, window_mask(60, oldest=oldest))
            found = run(model, host.new_cache(semantics), tokens, [20, 20, 10] + [1] * 10)
            assert relative(found, wanted) < 1e-9, semantics


def test_rows_that_a_boundary_needs_and_the_ring_lost_are_refused_with_their_numbers():
    model, tokens = double(num_hidden_layers=2), tiny_tokens(120)
    with host_of(model) as host:
        cache = host.new_cache(Served(120, (Boundary(20, "carried"),)))
        run(model, cache, tokens[:110], [20, 90])
        with pytest.raises(UnsupportedError, match="need exact rows from position 12 on, kept are those from 38 on"):
            run(model, cache, tokens[110:])
        with pytest.raises(UnsupportedError, match="earlier forward"):
            run(model, cache, tokens[110:])


TOKEN_GROUPS = {
    "kivi": CodecSpec(quantizer="token_group", group_tokens=8, group_start=WINDOWS.sink),
    "kitty": CodecSpec(quantizer="token_group", group_tokens=4, group_start=WINDOWS.sink, promoted=0.25),
    "rotated": CodecSpec(transform="orthogonal", centred=True, quantizer="token_group", group_tokens=5, group_start=3),
}


@pytest.mark.parametrize("group", TOKEN_GROUPS)
@pytest.mark.parametrize("sizes", [1, 7, [2, 1, 40, 3, 9, 5]])
def test_groups_of_tokens_are_coded_as_in_one_go_once_they_are_complete(group, sizes):
    spec = TOKEN_GROUPS[group]
    codec = codec_of(LAYER, spec, INT2, cast=torch.bfloat16)
    rows = frame_rows(codec, 60)
    whole, pieces = stored(SimulatedRows, codec, rows, 60), stored(SimulatedRows, codec, rows, sizes)
    complete = codec.block(60)[0]
    assert 52 <= complete <= 60
    for found, wanted in zip(pieces.decoded(3, complete), whole.decoded(3, complete), strict=True):
        assert torch.equal(found, wanted)
    # Rows taken back and others in their place: the open group is coded anew.
    other = frame_rows(codec, 60, seed=1)
    pieces.crop(50)
    pieces.append(other[0][:, 50:], other[1][:, 50:])
    mixed = [torch.cat([a[:, :50], b[:, 50:]], 1) for a, b in zip(rows, other, strict=True)]
    wanted = stored(SimulatedRows, codec, mixed, 60)
    assert all(map(torch.equal, pieces.decoded(3, complete), wanted.decoded(3, complete)))


@pytest.mark.parametrize("group", TOKEN_GROUPS)
def test_chunks_do_not_change_what_groups_of_tokens_answer(group):
    model, tokens = double(num_hidden_layers=2), tiny_tokens(70)
    sides = TOKEN_GROUPS[group], INT2
    wanted = one_pass(model, codecs_of(model, *sides), tokens, window_mask(70))
    with host_of(model, *sides, mode="simulate") as host:
        for chunks in (None, 1, 7, [33, 1, 1, 35]):
            assert relative(run(model, host.new_cache(), tokens, chunks), wanted) < 1e-9


def test_keys_coded_before_rope_follow_their_positions_whatever_the_chunks():
    model, tokens = double(num_hidden_layers=2), tiny_tokens(60)
    geometry = plan_geometry(model)
    spec = CodecSpec(transform="orthogonal", pre_rope=True)
    codecs = {
        layer.layer: HeadCodec.build(
            LayerPlan(layer=layer.layer, k=spec, v=INT2),
            layer,
            random_tensors(layer, spec, INT2),
            rotation=rotation_of(geometry.rope_of(layer)),
        )
        for layer in geometry.quantizable()
    }
    wanted = one_pass(model, codecs, tokens, window_mask(60))
    with Host(model, codecs, geometry, WINDOWS, mode="simulate") as host:
        for chunks in (None, 1, 7):
            assert relative(run(model, host.new_cache(), tokens, chunks), wanted) < 1e-9
