import numpy as np
import pytest
import torch

from kvcq.errors import InputError
from kvcq.stats.accumulator import LayerSums
from kvcq.stats.rotary import rotate
from tests.stats.examples import layer, rope, tensors


def sums_of(numbers, chunk=10_000, geometry=None, rotation=None):
    rotation = rotation or rope()
    total = LayerSums(geometry or layer(), rotation)
    for number in numbers:
        q, k, v, o = tensors(number, 1200 + number, rotation)
        total.begin()
        for start in range(0, k.shape[1], chunk):
            part = slice(start, start + chunk)
            total.add(q[:, part], k[:, part], v[:, part], o[:, part], torch.arange(k.shape[1])[part])
        total.finish()
    return total


def same(a, b):
    left, right = a.to_arrays(), b.to_arrays()
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def test_moments_equal_plain_numpy():
    total = sums_of([0])
    q, k, v, o = (x.double().numpy() for x in tensors(0, 1200, rope()))
    positions = torch.arange(1200)
    k0 = rotate(torch.from_numpy(k), positions, rope(), inverse=True).numpy()
    q0 = rotate(torch.from_numpy(q), positions, rope(), inverse=True).numpy()
    value = {name: limb.value().numpy() for name, limb in total.sums.items()}
    for name, rows in {"k": k, "v": v, "k0": k0}.items():
        np.testing.assert_allclose(value[f"{name}_sum"], rows.sum(1), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(value[f"{name}_moment"], np.einsum("hti,htj->hij", rows, rows), rtol=1e-9)
    for name, rows in {"q": q, "q0": q0, "o": o}.items():
        grouped = rows.reshape(2, -1, rows.shape[-1])
        np.testing.assert_allclose(
            value[f"{name}_moment"], np.einsum("hti,htj->hij", grouped, grouped), rtol=1e-9, atol=1e-9
        )
    np.testing.assert_allclose(value["q_sum"], q.reshape(2, -1, 8).sum(1), rtol=1e-9, atol=1e-9)
    assert (total.tokens, total.queries) == (1200, 2400)
    np.testing.assert_array_equal(total.extrema["k_min"].numpy(), k.min(1).astype(np.float32))
    np.testing.assert_array_equal(total.extrema["v_max"].numpy(), v.max(1).astype(np.float32))


@pytest.mark.parametrize("chunk", [1, 7, 512, 700])
def test_chunks_do_not_change_the_moments(chunk):
    whole, pieces = sums_of([1]), sums_of([1], chunk)
    for name, total in whole.sums.items():
        torch.testing.assert_close(total.value(), pieces.sums[name].value(), rtol=1e-11, atol=1e-9)
    assert pieces.tokens == whole.tokens


def test_merge_is_bit_equal_to_one_run_in_any_order():
    whole = sums_of([0, 1, 2, 3])
    left, right = sums_of([3, 1]), sums_of([2, 0])
    other = LayerSums.from_arrays(layer(), rope(), right.to_arrays())
    left.merge(right)
    other.merge(sums_of([1, 3]))
    assert same(left, whole)
    assert same(other, whole)


def test_one_and_two_threads_are_bit_equal():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = sums_of([0, 1])
        torch.set_num_threads(2)
        assert same(one, sums_of([0, 1]))
    finally:
        torch.set_num_threads(before)


def test_an_unfinished_sequence_leaves_no_trace():
    total = LayerSums(layer(), rope())
    q, k, v, o = tensors(9, 40, rope())
    total.begin()
    total.add(q, k, v, o, torch.arange(40))
    total.begin()
    q, k, v, o = tensors(0, 1200, rope())
    total.add(q, k, v, o, torch.arange(1200))
    total.finish()
    total.finish()
    assert same(total, sums_of([0]))


def test_half_precision_rows_are_summed_in_float64():
    rows = [torch.full((heads, 5000, d), 300.0, dtype=torch.float16) for heads, d in ((4, 8), (2, 8), (2, 6), (4, 6))]
    total = LayerSums(layer(unrotates=False), rope())
    total.begin()
    total.add(*rows, torch.arange(5000))
    total.finish()
    assert total.sums["q_moment"].value()[0, 0, 0].item() == 2 * 5000 * 300.0**2
    assert "k0_moment" not in total.sums


def test_layers_without_rotation_store_no_second_copy():
    assert "k0_sum" not in LayerSums(layer(rope=None), None).sums
    assert "k0_sum" in LayerSums(layer(), rope()).sums


def test_queries_of_a_sharing_layer_are_counted():
    q, k, v, o = tensors(0, 50, rope())
    total = LayerSums(layer(), rope())
    total.begin()
    total.add(q, k, v, o, torch.arange(50))
    total.add_queries(2 * q, o, torch.arange(50))
    total.finish()
    single = LayerSums(layer(), rope())
    single.begin()
    single.add(q, k, v, o, torch.arange(50))
    single.finish()
    assert (total.tokens, total.queries) == (50, 200)
    torch.testing.assert_close(total.sums["q0_moment"].value(), 5 * single.sums["q0_moment"].value())


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_rows_are_refused_with_layer_and_head(name, bad):
    rows = dict(zip("qkvo", tensors(0, 20, rope()), strict=True))
    rows[name][-1, 3, 2] = bad
    total = LayerSums(layer(7), rope())
    total.begin()
    total.add(rows["q"], rows["k"], rows["v"], rows["o"], torch.arange(20))
    with pytest.raises(InputError, match=rf"{name} is not finite \(layer 7, KV head 1\)"):
        total.finish()
    assert total.tokens == 0


def test_sums_beyond_the_limbs_are_refused_with_the_layer():
    huge = [torch.full(shape, 1e10) for shape in ((4, 3, 8), (2, 3, 8), (2, 3, 6), (4, 3, 6))]
    total = LayerSums(layer(5), rope())
    total.begin()
    total.add(*huge, torch.arange(3))
    with pytest.raises(InputError, match=r"layer 5, "):
        total.finish()


@pytest.mark.parametrize("damage", ["missing", "shape", "type", "limb"])
def test_damaged_arrays_are_refused(damage):
    arrays = sums_of([0]).to_arrays()
    if damage == "missing":
        del arrays["k_sum.hi"]
    elif damage == "shape":
        arrays["k_sum.hi"] = arrays["k_sum.hi"][:1]
    elif damage == "type":
        arrays["k_sum.hi"] = arrays["k_sum.hi"].astype(np.float64)
    else:
        arrays["k_sum.hi"] = np.full_like(arrays["k_sum.hi"], 2**62 + 1)
    with pytest.raises(InputError, match="layer 0"):
        LayerSums.from_arrays(layer(), rope(), arrays)


def test_merging_other_layers_or_past_the_limit_is_refused():
    with pytest.raises(InputError, match="different layers"):
        sums_of([0]).merge(LayerSums(layer(1), rope()))
    arrays = sums_of([0]).to_arrays()
    arrays["k_sum.hi"] = np.full_like(arrays["k_sum.hi"], 2**62)
    full = LayerSums.from_arrays(layer(), rope(), arrays)
    with pytest.raises(InputError, match=r"layer 0, k_sum"):
        full.merge(LayerSums.from_arrays(layer(), rope(), arrays))
