import pytest
import torch

from kvcq.models.geometry import plan_geometry
from kvcq.runtime.hf.cache import Host
from kvcq.runtime.layout import bits_per_element
from kvcq.spec.geometry import LayerGeometry, ModelGeometry
from kvcq.spec.plan import LayerPlan, Windows
from tests.runtime.hf.setup import GROUPED, INT2, PAIRS, VQ, codec_of, host_of, run
from tests.tiny import tiny_model, tiny_tokens

CONTEXTS = (1, 63, 64, 65, 127, 128, 129, 400)


def cache_of(d_k, d_v, pair, windows, batch, context):
    """A packed cache of two layers with 3 KV heads, filled to `context` tokens with random rows, without a model."""
    layers = tuple(LayerGeometry(layer=i, kind="full", q_heads=6, kv_heads=3, d_k=d_k, d_v=d_v) for i in range(2))
    plan = [LayerPlan(layer=i, k=pair[0], v=pair[1]) for i in range(2)]
    model = tiny_model(num_hidden_layers=2)
    geometry = ModelGeometry(model_type="llama", hidden_size=64, vocab_size=128, layers=layers)
    with Host(model, {g.layer: codec_of(g, *pair, cast=torch.bfloat16) for g in layers}, geometry, windows) as host:
        cache = host.new_cache()
    for layer in cache.quantized():
        layer.lazy_initialization(torch.zeros(batch, 3, 0, d_k), torch.zeros(batch, 3, 0, d_v))
        for request in layer.requests:
            request.append(torch.randn(3, context, d_k), torch.randn(3, context, d_v))
    return cache, bits_per_element(plan, geometry, windows, context), 2 * 3 * (d_k + d_v) * context


@pytest.mark.parametrize(("d_k", "d_v"), [(64, 64), (80, 80), (128, 128), (256, 256), (128, 64)])
@pytest.mark.parametrize("pair", PAIRS)
def test_allocated_bytes_are_the_bits_per_element_to_the_byte(d_k, d_v, pair):
    for context in CONTEXTS if d_k < 256 else (65,):
        cache, bits, elements = cache_of(d_k, d_v, PAIRS[pair], Windows(), 1, context)
        assert cache.allocated_bytes() == round(bits.total * elements / 8), context


@pytest.mark.parametrize(
    "windows", [Windows(sink=0, recent=0), Windows(sink=5, recent=7), Windows(sink=64, recent=512)]
)
@pytest.mark.parametrize("batch", [1, 3])
def test_windows_and_requests_are_counted(windows, batch):
    cache, bits, elements = cache_of(64, 64, (VQ, INT2), windows, batch, 100)
    assert cache.allocated_bytes() == batch * round(bits.total * elements / 8)


def test_four_groups_on_one_side_pay_for_both():
    grouped, bits, elements = cache_of(64, 64, (INT2, GROUPED), Windows(), 1, 64)
    assert grouped.allocated_bytes() == round(bits.total * elements / 8)
    assert bits.metadata == 2 * 4 * 4 * 8 / 128


def test_crop_reorder_and_copies_keep_the_arithmetic():
    model = tiny_model(num_hidden_layers=2)
    windows = Windows(sink=4, recent=100)
    with host_of(model, windows=windows, cast=torch.bfloat16) as host:
        cache = host.new_cache()
        run(model, cache, tiny_tokens(200).view(2, 100))
        plan = [LayerPlan(layer=i, k=INT2, v=INT2) for i in range(2)]

        def expected(context):
            return round(bits_per_element(plan, plan_geometry(model), windows, context).total * context * 32)

        assert cache.allocated_bytes() == 2 * expected(100)
        cache.crop(-40)
        assert cache.allocated_bytes() == 2 * expected(60)
        cache.batch_repeat_interleave(2)
        assert cache.allocated_bytes() == 4 * expected(60)
        cache.reorder_cache(torch.tensor([0, 0, 3, 1]))
        assert cache.allocated_bytes() == 4 * expected(60)
        cache.batch_select_indices(torch.tensor([True, False, True, False]))
        assert cache.allocated_bytes() == 2 * expected(60)
        cache.reset()
        assert cache.allocated_bytes() == 0


def test_no_storage_behind_a_tensor_is_larger_than_the_tensor():
    model = tiny_model(num_hidden_layers=2)
    with host_of(model, cast=torch.bfloat16) as host:
        cache = host.new_cache()
        run(model, cache, tiny_tokens(150), [130, 10, 10])
        cache.crop(-30)
        tensors = [tensor for layer in cache.quantized() for tensor in layer.tensors()]
    assert sum(t.untyped_storage().nbytes() for t in tensors) == cache.allocated_bytes()
