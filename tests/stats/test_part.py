from dataclasses import replace

import numpy as np
import pytest
import torch

from kvcq.errors import InputError
from kvcq.spec.header import DataSource, StatsHeader
from kvcq.spec.identity import Identity, Provenance
from kvcq.stats.part import layer_stats, merge_parts
from kvcq.stats.rotary import rotate
from kvcq.stats.rows import RowStore
from tests.stats.examples import choose, collect, digest, equal_parts, layer, model, rope, tensors

NUMBERS = range(7)
LENGTHS = {n: 24 + 9 * n for n in NUMBERS}
GEOMETRY = model(layer(0), layer(2), layer(3, rope=None))


def header_of(part, geometry=GEOMETRY):
    source = DataSource(sources=(), sha256="", template="raw", packing="on", seq_len=64, got_tokens=1)
    return StatsHeader(
        identity=Identity(geometry="", vocabulary="", norms={}, biases={}),
        provenance=Provenance(source="toy"),
        geometry=geometry,
        data=source,
        sequences=part.sequences,
        probe=part.probe,
        tokens=part.tokens,
        longest=80,
        rows=20,
        query_rows=6,
        seed=3,
        dtype="float32",
        chunk=64,
        skipped={},
        versions={},
    )


def part_of(mine, chunk=1000):
    selection, plan = choose(NUMBERS, LENGTHS, mine)
    return collect(GEOMETRY, mine, LENGTHS, selection, plan, chunk)


WHOLE = part_of(list(NUMBERS))


@pytest.mark.parametrize("shards", [[[0, 2, 4, 6], [1, 3, 5]], [[6], [0, 1], [5, 4, 3, 2]], [[3, 2, 1, 0, 6, 5, 4]]])
def test_merged_shards_are_bit_equal_to_one_run_in_any_order(shards):
    parts = [part_of(shard) for shard in shards]
    assert equal_parts(merge_parts(GEOMETRY, parts, 20, 6), WHOLE)
    assert equal_parts(merge_parts(GEOMETRY, parts[::-1], 20, 6), WHOLE)
    pairs = merge_parts(GEOMETRY, [merge_parts(GEOMETRY, parts[:2], 20, 6), *parts[2:]], 20, 6)
    assert equal_parts(pairs, WHOLE)


def test_an_interrupted_part_and_the_rest_merge_to_the_whole():
    selection, plan = choose(NUMBERS, LENGTHS)
    first = collect(GEOMETRY, [5, 0, 3], LENGTHS, selection, plan)
    rest = collect(GEOMETRY, [1, 2, 4, 6], LENGTHS, selection, plan)
    assert equal_parts(merge_parts(GEOMETRY, [rest, first], 20, 6), WHOLE)


def test_chunks_select_the_same_rows():
    pieces = part_of(list(NUMBERS), chunk=7)
    assert pieces.samples.keys() == WHOLE.samples.keys()
    assert all(torch.equal(pieces.samples[name], WHOLE.samples[name]) for name in WHOLE.samples)


def test_rows_are_aligned_over_layers_and_probe_is_left_out():
    rows = {name: WHOLE.samples[f"rows.{name}"] for name in ("positions", "sequence", "index", "hashes")}
    assert set(WHOLE.probe).isdisjoint(WHOLE.sequences)
    assert len(WHOLE.probe) == 2
    numbers = {digest(n): n for n in NUMBERS}
    for one in GEOMETRY.quantizable():
        for i, (owner, position) in enumerate(zip(rows["sequence"], rows["positions"], strict=True)):
            number = numbers[WHOLE.sequences[owner]]
            rotation = GEOMETRY.rope_of(one)
            q, k, v, _ = tensors(100 * number + one.layer, LENGTHS[number], rotation)
            assert torch.equal(WHOLE.samples[f"layers.{one.layer}.rows.k"][:, i], k[:, position])
            assert torch.equal(WHOLE.samples[f"layers.{one.layer}.rows.v"][:, i], v[:, position])
            if i < 6:
                assert torch.equal(WHOLE.samples[f"layers.{one.layer}.rows.q"][:, i], q[:, position])
    assert WHOLE.samples["layers.0.rows.q"].shape[1] == 6


def test_a_layer_reads_back_as_means_of_its_tokens():
    stats = layer_stats(header_of(WHOLE), WHOLE.moments, WHOLE.samples, 2)
    counted = [n for n in NUMBERS if digest(n) in WHOLE.sequences]
    runs = [tensors(100 * n + 2, LENGTHS[n], rope()) for n in counted]
    q, k, v, o = (torch.cat([run[i] for run in runs], dim=1).double() for i in range(4))
    assert stats.tokens == k.shape[1] == WHOLE.tokens
    torch.testing.assert_close(stats.moments["k_mean"], k.mean(1))
    torch.testing.assert_close(stats.moments["v_second"], v.transpose(1, 2) @ v / k.shape[1])
    grouped = q.reshape(2, -1, 8)
    torch.testing.assert_close(stats.moments["q_second"], grouped.transpose(1, 2) @ grouped / grouped.shape[1])
    grouped = o.reshape(2, -1, 6)
    torch.testing.assert_close(stats.moments["o_second"], grouped.transpose(1, 2) @ grouped / grouped.shape[1])
    centred = k - k.mean(1, keepdim=True)
    torch.testing.assert_close(stats.k_cov, centred.transpose(1, 2) @ centred / k.shape[1])
    ratio = k.mean(1).square().sum(-1) / centred.square().mean(1).sum(-1)
    torch.testing.assert_close(stats.mean_ratio, ratio)
    assert stats.v_cov.shape == (2, 6, 6)
    back = rotate(stats.k_rows, stats.row_positions, stats.rope, inverse=True)
    assert back.shape == stats.k_rows.shape
    assert torch.equal(stats.q_row_positions, stats.row_positions[:6])


def test_probe_rows_are_whole_sequences():
    stats = layer_stats(header_of(WHOLE), WHOLE.moments, WHOLE.samples, 0)
    numbers = {digest(n): n for n in NUMBERS}
    for name, probe in zip(WHOLE.probe, stats.probes, strict=True):
        q, k, v, _ = tensors(100 * numbers[name], LENGTHS[numbers[name]], rope())
        assert torch.equal(probe.k, k)
        assert torch.equal(probe.v, v)
        assert torch.equal(probe.q, q[:, probe.q_index])
        assert torch.equal(probe.positions, torch.arange(k.shape[1]))


def test_few_sequences_give_their_tails_as_probe():
    lengths = {0: 80, 1: 48}
    selection, plan = choose([0, 1], lengths)
    geometry = model(layer(0))
    part = collect(geometry, [0, 1], lengths, selection, plan, chunk=13)
    stats = layer_stats(header_of(part, geometry), part.moments, part.samples, 0)
    assert part.tokens == 70 + 42
    assert sorted(probe.positions.tolist()[0] for probe in stats.probes) == [42, 70]
    assert part.samples["rows.index"].max() < 70


def test_half_precision_rows_keep_their_type_when_a_part_has_none():
    selection, plan = choose(NUMBERS, LENGTHS)
    whole = {name: t.bfloat16() if t.is_floating_point() else t for name, t in WHOLE.samples.items()}
    empty = collect(GEOMETRY, [], LENGTHS, selection, plan)
    merged = merge_parts(GEOMETRY, [empty, replace(WHOLE, samples=whole)], 20, 6)
    assert merged.samples["layers.0.rows.k"].dtype == torch.bfloat16
    assert torch.equal(merged.samples["layers.0.rows.q"], whole["layers.0.rows.q"])
    assert empty.tokens == 0


def test_parts_that_do_not_belong_together_are_refused():
    with pytest.raises(InputError, match="same sequence"):
        merge_parts(GEOMETRY, [WHOLE, WHOLE], 20, 6)
    probe_owner = next(n for n in NUMBERS if digest(n) in WHOLE.probe)
    a = part_of([probe_owner])
    b = replace(a, samples={name: t + 1 if name.startswith("probe") else t for name, t in a.samples.items()})
    with pytest.raises(InputError, match="probe rows"):
        merge_parts(GEOMETRY, [a, b], 20, 6)
    small = {name: t[:, :1] if name.endswith("rows.q") else t for name, t in WHOLE.samples.items()}
    with pytest.raises(InputError, match="query budgets"):
        merge_parts(GEOMETRY, [replace(WHOLE, samples=small)], 20, 6)


def test_incomplete_files_and_unknown_layers_are_refused():
    header = header_of(WHOLE)
    with pytest.raises(InputError, match="layer 1"):
        layer_stats(header, WHOLE.moments, WHOLE.samples, 1)
    with pytest.raises(InputError, match=r"rows\.v"):
        layer_stats(header, WHOLE.moments, {n: t for n, t in WHOLE.samples.items() if "rows.v" not in n}, 0)
    zero = {name: np.zeros_like(array) for name, array in WHOLE.moments.items()}
    with pytest.raises(InputError, match="no token"):
        layer_stats(header, zero, WHOLE.samples, 0)


def test_rows_return_to_a_store_of_the_same_selection_only():
    part = collect(GEOMETRY, NUMBERS, LENGTHS, *choose(NUMBERS, LENGTHS))
    layers = list(GEOMETRY.quantizable())
    store = RowStore(*choose(NUMBERS, LENGTHS))
    store.restore(part.sequences, part.probe, layers, part.samples)
    sequences, probe, samples = store.pack(layers)
    assert equal_parts(part, replace(part, sequences=sequences, probe=probe, samples=samples))
    with pytest.raises(InputError, match="another selection"):
        RowStore(*choose(NUMBERS, LENGTHS, seed=4)).restore(part.sequences, part.probe, layers, part.samples)
