"""Synthetic layers and sequences shared by the tests of statistics."""

import hashlib

import numpy as np
import torch

from kvcq.spec.geometry import LayerGeometry, ModelGeometry, RopeSpec
from kvcq.stats.accumulator import LayerSums
from kvcq.stats.part import StatsPart, pack_stats
from kvcq.stats.probe import choose_probe
from kvcq.stats.rotary import rotate
from kvcq.stats.rows import RowStore
from kvcq.stats.sampling import RowSelection

D, DV = 8, 6


def rope(pairing="half", sense=1, rotary=D, offset=0):
    frequencies = tuple(float(np.float32(0.7**i)) for i in range(rotary // 2))
    return RopeSpec(rotary_dims=rotary, offset=offset, pairing=pairing, sense=sense, inv_freq=frequencies)


def layer(number=0, unrotates=True, **fields):
    given = {"kind": "full", "q_heads": 4, "kv_heads": 2, "d_k": D, "d_v": DV, "rope": 0, "unrotates": unrotates}
    return LayerGeometry(layer=number, **(given | fields))


def model(*layers, ropes=None):
    return ModelGeometry(
        model_type="toy", hidden_size=8, vocab_size=16, ropes=ropes or (rope(),), layers=layers or (layer(),)
    )


def digest(number):
    return hashlib.sha256(str(number).encode()).hexdigest()


def tensors(number, length, rotation=None, dtype=torch.float32):
    """Return q, k, v, o of one seeded sequence; q and k are rotated to positions 0..length-1."""
    generator = torch.Generator().manual_seed(number)
    q = torch.randn(4, length, D, generator=generator) + 0.5
    k = torch.randn(2, length, D, generator=generator) * torch.arange(1, D + 1) + 1.0
    v = torch.randn(2, length, DV, generator=generator)
    o = torch.randn(4, length, DV, generator=generator)
    positions = torch.arange(length)
    return [x.to(dtype) for x in (rotate(q, positions, rotation), rotate(k, positions, rotation), v, o)]


def collect(geometry, numbers, lengths, selection, plan, chunk=1000) -> StatsPart:
    """Collect the sequences `numbers` from synthetic tensors, as capture does from a model."""
    sums = [LayerSums(one, geometry.rope_of(one)) for one in geometry.quantizable()]
    store = RowStore(selection, plan)
    for number in numbers:
        for one in sums:
            one.begin()
            q, k, v, o = tensors(100 * number + one.geometry.layer, lengths[number], one.rope)
            for start in range(0, lengths[number], chunk):
                part = slice(start, min(start + chunk, lengths[number]))
                positions = torch.arange(part.start, part.stop)
                store.put(
                    one.geometry, digest(number), start, positions, {"k": k[:, part], "v": v[:, part], "q": q[:, part]}
                )
                counted = slice(start, min(part.stop, plan.counted[digest(number)]))
                if counted.start < counted.stop:
                    pick = torch.arange(counted.start, counted.stop)
                    one.add(q[:, counted], k[:, counted], v[:, counted], o[:, counted], pick)
            one.finish()
        store.done.add(digest(number))
    return pack_stats(sums, store)


def choose(numbers, lengths, mine=None, rows=20, query_rows=6, seed=3):
    """Return (selection, plan) for the sequences `mine` of the whole list `numbers`."""
    plan = choose_probe([(digest(n), [(0, lengths[n])]) for n in numbers])
    selection = RowSelection(rows, query_rows, seed)
    for n in numbers if mine is None else mine:
        if plan.counted[digest(n)]:
            selection.offer(digest(n), plan.counted[digest(n)])
    return selection, plan


def equal_parts(a: StatsPart, b: StatsPart) -> bool:
    """Compare two parts bit for bit, order of the sequences included."""
    return (
        a.sequences == b.sequences
        and a.probe == b.probe
        and a.moments.keys() == b.moments.keys()
        and a.samples.keys() == b.samples.keys()
        and all(np.array_equal(a.moments[name], b.moments[name]) for name in a.moments)
        and all(torch.equal(a.samples[n], b.samples[n]) and a.samples[n].dtype == b.samples[n].dtype for n in a.samples)
    )
