"""Whatever would bypass the codes ends in an error of kvcq, and after `close` the model is what it was."""

import gc
import threading

import pytest
import torch

from kvcq.errors import KvcqError, MismatchError, UnsupportedError
from kvcq.models.geometry import plan_geometry
from kvcq.models.library import forward, new_cache
from kvcq.runtime.hf.cache import Host
from kvcq.runtime.hf.semantics import Served
from kvcq.runtime.hf.ticket import Ticket
from kvcq.spec.codec import CodecSpec
from tests.runtime.hf.setup import GROUPED, INT2, LOSSLESS, WINDOWS, codecs_of, double, host_of, relative, run
from tests.tiny import tiny_model, tiny_tokens

OLD, NEW = tiny_tokens(30), tiny_tokens(5, seed=1)


def test_after_closing_the_model_is_what_it_was():
    model = tiny_model("gemma2")
    wanted, before = forward(model, OLD[None]), model.config._attn_implementation
    with host_of(model) as host:
        cache = host.new_cache()
        assert relative(run(model, cache, OLD), wanted) > 1e-3
        assert model.config._attn_implementation != before
    assert model.config._attn_implementation == before
    assert torch.equal(forward(model, OLD[None]), wanted)


def test_a_collected_cache_gives_the_model_back():
    model = tiny_model()
    before = model.config._attn_implementation
    cache = host_of(model).new_cache()
    run(model, cache, OLD)
    assert model.config._attn_implementation != before
    del cache
    gc.collect()
    assert model.config._attn_implementation == before


def test_the_library_cache_goes_on_beside_an_open_host():
    model = tiny_model("qwen2")
    wanted = run(model, new_cache(model), OLD)
    with host_of(model) as host:
        cache, own = host.new_cache(), new_cache(model)
        run(model, cache, OLD[:10])
        assert relative(run(model, own, OLD, 7), wanted) < 1e-5
        assert relative(forward(model, OLD[None]), wanted) < 1e-5


def test_attention_switched_after_loading_is_refused_and_stays_as_switched():
    model = tiny_model()
    with host_of(model) as host:
        cache = host.new_cache()
        run(model, cache, OLD)
        model.set_attn_implementation("eager")
        with pytest.raises(UnsupportedError, match="switched, or the cache was closed"):
            run(model, cache, NEW)
    assert model.config._attn_implementation == "eager"
    forward(model, OLD[None])


def test_a_closed_cache_is_refused():
    model = tiny_model()
    host = host_of(model)
    cache = host.new_cache()
    run(model, cache, OLD)
    cache.close()
    with pytest.raises(UnsupportedError, match="closed"):
        run(model, cache, NEW)
    with pytest.raises(UnsupportedError, match="host is closed"):
        host.new_cache()
    cache.close()


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_cache_of_another_model_is_refused_at_its_first_layer(attached, layers):
    mine, other = tiny_model(num_hidden_layers=layers), tiny_model(num_hidden_layers=layers, seed=1)
    with host_of(mine) as host:
        if attached:
            second = host_of(other)
            with pytest.raises(MismatchError, match="another model"):
                run(other, host.new_cache(), OLD)
            second.close()
        else:
            with pytest.raises(UnsupportedError, match=r"by itself .*layer 0"):
                run(other, host.new_cache(), OLD)


def test_a_model_of_another_shape_is_refused():
    model, wide = tiny_model(), tiny_model(num_key_value_heads=4)
    with host_of(model) as host, pytest.raises(MismatchError, match="KV heads and head dims"):
        run(wide, host.new_cache(), OLD)


def test_a_model_spread_over_devices_is_refused():
    model = tiny_model()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(UnsupportedError, match="spread over 2 devices"):
        host_of(model)


def test_codes_that_pages_do_not_hold_are_refused_packed_and_simulated():
    model = tiny_model()
    for sides in (LOSSLESS, (CodecSpec(transform="orthogonal", bits=4), INT2), (INT2, LOSSLESS[1])):
        with pytest.raises(UnsupportedError, match=r"accuracy only.*layer 0.*simulate"):
            host_of(model, *sides)
        with host_of(model, *sides, mode="simulate") as host:
            run(model, host.new_cache(), OLD)
    with pytest.raises(UnsupportedError, match="no mode 'fast'"):
        host_of(model, mode="fast")


def test_nothing_to_quantize_and_layers_that_are_not_there_are_refused():
    model = tiny_model(num_hidden_layers=2)
    geometry = plan_geometry(tiny_model())
    codecs = codecs_of(tiny_model())
    with pytest.raises(UnsupportedError, match="no layer is quantized"):
        Host(model, {}, geometry, WINDOWS)
    with pytest.raises(MismatchError, match="does not have this layer"):
        Host(model, codecs, geometry, WINDOWS)
    sliding = tiny_model("gemma3_text")
    with pytest.raises(MismatchError, match="DynamicSlidingWindowLayer"):
        Host(sliding, codecs, geometry, WINDOWS)
    assert model.config._attn_implementation == sliding.config._attn_implementation == "sdpa"


def test_models_whose_cache_holds_more_than_keys_and_values_are_refused():
    with pytest.raises(UnsupportedError, match=r"no other cache than its own MiniMaxCache.*minimax"):
        host_of(tiny_model("minimax", layer_types=["full_attention", "linear_attention"] * 2))
    with pytest.raises(MismatchError, match=r"LinearAttentionAndFullAttentionLayer.*layer 0"):
        host_of(tiny_model("falcon_h1"))


def test_another_batch_and_offloading_are_refused():
    model = tiny_model()
    with host_of(model) as host:
        cache = host.new_cache()
        run(model, cache, OLD)
        with pytest.raises(UnsupportedError, match="a batch of 2 for a cache of 1"):
            run(model, cache, torch.stack([NEW, NEW]))
        for move in (cache.layers[0].offload, cache.layers[0].prefetch):
            with pytest.raises(UnsupportedError, match="not offloaded"):
                move()
        cache.reset()
        run(model, cache, torch.stack([NEW, NEW]))


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("part", ["mlp", "o_proj"])
def test_a_cache_whose_forward_died_is_refused_until_it_is_reset(at, part):
    model = tiny_model()
    layer = model.model.layers[at]

    def die(*_):
        raise RuntimeError("died")

    with host_of(model) as host:
        cache = host.new_cache()
        run(model, cache, OLD)
        wanted = run(model, cache, NEW)
        cache.reset()
        run(model, cache, OLD)
        handle = (layer.mlp if part == "mlp" else layer.self_attn.o_proj).register_forward_pre_hook(die)
        with pytest.raises(RuntimeError, match="died"):
            run(model, cache, NEW)
        handle.remove()
        if at < 3:
            with pytest.raises(UnsupportedError, match="did not reach every layer"):
                run(model, cache, NEW)
        else:
            # Every layer has the rows: the cache is whole, and holds them.
            assert {layer.get_seq_length() for layer in cache.layers} == {35}
        cache.reset()
        run(model, cache, OLD)
        assert torch.equal(run(model, cache, NEW), wanted)


def test_a_cache_whose_first_forward_died_is_refused_until_it_is_reset():
    model = tiny_model()

    def die(*_):
        raise RuntimeError("died")

    with host_of(model) as host:
        cache = host.new_cache()
        handle = model.model.layers[2].register_forward_pre_hook(die)
        with pytest.raises(RuntimeError, match="died"):
            run(model, cache, OLD)
        handle.remove()
        with pytest.raises(UnsupportedError, match="layer 2 holds 0 tokens"):
            run(model, cache, NEW)
        cache.reset()
        assert torch.equal(run(model, cache, NEW), run(model, host.new_cache(), NEW))


def test_rows_that_were_never_attended_to_are_refused():
    model = tiny_model()
    with host_of(model) as host:
        cache = host.new_cache()
        cache.update(torch.zeros(1, 2, 3, 32), torch.zeros(1, 2, 3, 32), 0)
        with pytest.raises(UnsupportedError, match="before its rows were attended to"):
            run(model, cache, NEW)


def test_a_ticket_can_be_described_and_not_read():
    model = tiny_model()
    with host_of(model) as host:
        cache = host.new_cache()
        key, _ = cache.update(torch.zeros(1, 2, 3, 32), torch.zeros(1, 2, 3, 32), 0)
    assert key.shape == (1, 2, 3, 32) and key.dtype == torch.float32 and key.device.type == "cpu"
    assert key.to(key.device) is key.contiguous() is key
    readers = [
        lambda: key + 1,
        lambda: key.repeat_interleave(2, 1),
        lambda: torch.matmul(torch.zeros(1, 2, 1, 32), key.transpose(2, 3)),
        lambda: torch.nn.functional.scaled_dot_product_attention(torch.zeros(1, 2, 1, 32), key, key),
        lambda: key[:, :, -1:],
        lambda: key.to(torch.bfloat16),
        lambda: torch.cat([torch.zeros(1, 2, 3, 32), key], 2),
        lambda: key.float().tolist(),
    ]
    for read in readers:
        with pytest.raises(UnsupportedError, match=r"by itself .*layer 0"):
            read()
    # Should anything get past that, it gets NaN.
    with torch._C.DisableTorchFunctionSubclass():
        assert isinstance(key, Ticket) and bool(key.isnan().all())


def test_bundles_and_modes_interleave_on_one_model():
    model, tokens = double(), tiny_tokens(60)
    first, second = host_of(model, GROUPED, INT2), host_of(model, seed=5, mode="simulate")
    caches = [first.new_cache(), second.new_cache(Served())]
    pieces = [tokens[a : a + 20] for a in (0, 20, 40)]
    mixed = [[run(model, cache, piece) for cache in caches] for piece in pieces]
    second.close()
    alone = [run(model, (fresh := first.new_cache()), piece) for piece in pieces[:1]]
    alone += [run(model, fresh, piece) for piece in pieces[1:]]
    for (found, other), wanted in zip(mixed, alone, strict=True):
        assert torch.equal(found, wanted) and relative(other, wanted) > 1e-3
    first.close()
    assert model.config._attn_implementation == "sdpa"


def test_threads_with_a_cache_each_do_not_disturb_one_another():
    model = double(num_hidden_layers=2)
    prompts = [tiny_tokens(20, seed=seed) for seed in range(4)]
    with host_of(model) as host:
        wanted = [run(model, host.new_cache(), prompt, 1) for prompt in prompts]
        found = [None] * 4

        def work(number):
            found[number] = run(model, host.new_cache(), prompts[number], 1)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(map(torch.equal, found, wanted))


def test_every_refusal_is_one_line():
    model = tiny_model()
    with host_of(model) as host:
        cache = host.new_cache()
        run(model, cache, tiny_tokens(200))
        with pytest.raises(KvcqError) as refused:
            cache.crop(-100)
    assert "\n" not in str(refused.value)
