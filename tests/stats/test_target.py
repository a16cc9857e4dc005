from dataclasses import replace

import pytest
import torch

from kvcq.errors import InputError, UnsupportedError
from kvcq.stats.part import layer_stats
from kvcq.stats.rotary import rotate
from kvcq.stats.target import retarget
from tests.stats.examples import choose, collect, digest, layer, model, tensors
from tests.stats.test_part import header_of

LENGTHS = {n: 30 + n for n in range(6)}


def stats_of(*layers):
    geometry = model(*layers)
    selection, plan = choose(list(LENGTHS), LENGTHS, rows=100)
    part = collect(geometry, list(LENGTHS), LENGTHS, selection, plan)
    return layer_stats(header_of(part, geometry), part.moments, part.samples, layers[0].layer), part


def test_moments_are_the_average_over_every_position():
    stats, part = stats_of(layer(0))
    target = retarget(stats, 200, 16, seed=1)
    runs = [tensors(100 * n, LENGTHS[n], None) for n in LENGTHS if digest(n) in part.sequences]
    for name, at in (("q", 0), ("k", 1)):
        rows = torch.cat([run[at] for run in runs], dim=1).double().reshape(2, -1, 8)
        turned = torch.cat([rotate(rows, torch.full((rows.shape[1],), p), stats.rope) for p in range(16, 200)], dim=1)
        torch.testing.assert_close(target.moments[f"{name}_mean"], turned.mean(1), rtol=1e-6, atol=1e-6)
        second = turned.transpose(1, 2) @ turned / turned.shape[1]
        torch.testing.assert_close(target.moments[f"{name}_second"], second, rtol=1e-6, atol=1e-6)
    for name in ("v_mean", "v_second", "o_second", "k0_second"):
        assert target.moments[name] is stats.moments[name]


def test_rows_turn_to_new_positions_and_sink_rows_go():
    stats, _ = stats_of(layer(0))
    target = retarget(stats, 500, 16, seed=1)
    kept = stats.row_positions >= 16
    assert target.k_rows.shape[1] == target.v_rows.shape[1] == len(target.row_positions) == int(kept.sum())
    assert target.row_positions.min() >= 16
    assert 100 < target.row_positions.max() < 500
    before = rotate(stats.k_rows[:, kept], stats.row_positions[kept], stats.rope, inverse=True)
    after = rotate(target.k_rows, target.row_positions, stats.rope, inverse=True)
    torch.testing.assert_close(before, after, rtol=1e-5, atol=1e-4)
    queries = stats.q_row_positions >= 16
    before = rotate(stats.q_rows[:, queries], stats.q_row_positions[queries], stats.rope, inverse=True)
    after = rotate(target.q_rows, target.q_row_positions, stats.rope, inverse=True)
    torch.testing.assert_close(before, after, rtol=1e-5, atol=1e-4)


def test_same_seed_same_rows_and_layers_share_positions():
    first, second = stats_of(layer(0))[0], stats_of(layer(3))[0]
    one, again = retarget(first, 500, 16, seed=1), retarget(first, 500, 16, seed=1)
    assert torch.equal(one.k_rows, again.k_rows)
    assert torch.equal(one.row_positions, retarget(second, 500, 16, seed=1).row_positions)
    assert not torch.equal(one.row_positions, retarget(first, 500, 16, seed=2).row_positions)


def test_a_probe_shifts_as_a_whole_and_keeps_its_scores():
    stats, _ = stats_of(layer(0))
    target = retarget(stats, 5000, 16, seed=1)
    for old, new in zip(stats.probes, target.probes, strict=True):
        assert len(set((new.positions - old.positions).tolist())) == 1
        assert new.positions.max() < 5000
        scores, again = (p.q[:2] @ p.k.transpose(1, 2) for p in (old, new))
        torch.testing.assert_close(scores, again, rtol=1e-4, atol=1e-3)
    short = retarget(stats, 20, 16, seed=1)
    assert all(torch.equal(a.positions, b.positions) for a, b in zip(stats.probes, short.probes, strict=True))


def test_layers_without_positions_keep_their_moments():
    stats, _ = stats_of(layer(0, rope=None))
    target = retarget(stats, 500, 16, seed=1)
    assert all(torch.equal(target.moments[name], stats.moments[name]) for name in stats.moments)
    assert torch.equal(target.k_rows, stats.k_rows[:, stats.row_positions >= 16])


def test_layers_that_do_not_unrotate_are_refused_beyond_the_collected_length():
    stats, _ = stats_of(layer(4, unrotates=False))
    assert retarget(stats, 30, 16, seed=1, collected=36) is stats
    for collected in (36, None):
        with pytest.raises(UnsupportedError, match="layer 4"):
            retarget(stats, 37, 16, seed=1, collected=collected)


def test_a_target_within_the_sink_is_refused():
    stats = replace(stats_of(layer(0))[0], probes=())
    with pytest.raises(InputError, match="--target-context"):
        retarget(stats, 16, 16, seed=0)
