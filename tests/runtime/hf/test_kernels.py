"""Kernels in place of torch: the same storage and the same answers, whatever happens to a cache.

On a CPU they run in Triton's interpreter; on CUDA the same laws hold in bfloat16, further apart.
"""

import copy
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvcq.artifacts.bundle import open_bundle
from kvcq.errors import UnsupportedError
from kvcq.models.geometry import plan_geometry
from kvcq.pipeline.proof import prove
from kvcq.runtime.hf.cache import Host
from kvcq.runtime.hf.kernels import LayerKernels, describe
from kvcq.runtime.hf.load import open_host
from kvcq.runtime.hf.semantics import ByQuery, Deferred, Served
from kvcq.runtime.hf.turn import Turns
from kvcq.runtime.layout import bits_per_element
from kvcq.spec.boundary import Boundary
from kvcq.spec.plan import LayerPlan
from tests.chain import make_world
from tests.runtime.hf.setup import (
    INT2,
    PAIRS,
    VQ,
    WINDOWS,
    batch_forward,
    codec_of,
    codecs_of,
    host_of,
    relative,
    run,
)
from tests.tiny import tiny_model, tiny_tokens

CUDA = torch.cuda.is_available()

on_cpu = pytest.mark.skipif(CUDA, reason="kernels are compiled here, which takes CUDA tensors")
CHUNKS = [66, 1, 3, 1]


def tiny(family="llama", dtype=torch.float32, **options):
    model = tiny_model(family, **options).to(dtype)
    # The fused attention of older versions drops the softcap.
    model.set_attn_implementation("eager")
    return model


def shallow(family):
    """As few layers as leave one quantized."""
    if family == "gemma3n_text":
        # Two layers, and two that share their rows.
        kinds = ["full_attention", "sliding_attention"] * 2
        lists = {"activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [96] * 4}
        return {"num_hidden_layers": 4, "layer_types": kinds, **lists}
    layers = {"llama": 1, "qwen2": 1, "gemma2": 2, "gpt_oss": 2}
    return {"num_hidden_layers": layers[family]} if family in layers else {}


def both(model, k=INT2, v=INT2, **options):
    """Hosts of the same codecs: read by torch and by kernels."""
    return host_of(model, k, v, kernels=False, **options), host_of(model, k, v, kernels=True, **options)


def one_head(**options):
    """The cheapest model for laws that are not about heads: kernels run once a head."""
    return tiny(num_hidden_layers=1, num_key_value_heads=1, **options)


def requests(cache):
    return [request for layer in cache.quantized() for request in layer.requests]


@on_cpu
@pytest.mark.parametrize(
    ("family", "pair"),
    [
        ("llama", "vq"),
        ("qwen2", "grouped keys"),
        ("gpt_oss", "grouped values"),
        ("gemma2", "int2"),
        ("gemma3n_text", "int2"),
        pytest.param("llama", "grouped keys", marks=pytest.mark.exhaustive),
        pytest.param("llama", "grouped values", marks=pytest.mark.exhaustive),
        pytest.param("gpt_oss", "int2", marks=pytest.mark.exhaustive),
        pytest.param("qwen2", "int2", marks=pytest.mark.exhaustive),
    ],
)
def test_kernels_answer_and_store_as_torch_does(family, pair):
    # Families: softcap, learned sinks, biases, layers that share rows.
    model, tokens = tiny(family, **shallow(family)), tiny_tokens(71)
    logits, caches = [], []
    for host in both(model, *PAIRS[pair]):
        with host:
            caches.append(host.new_cache())
            logits.append(run(model, caches[-1], tokens, CHUNKS))
    assert relative(logits[1], logits[0]) < 3e-3
    assert caches[0].allocated_bytes() == caches[1].allocated_bytes() and caches[1].ahead_bytes() == 0
    for torchs, kernels in zip(*map(requests, caches), strict=True):
        assert (torchs.length, torchs.held) == (kernels.length, kernels.held)
        # Rows a rounding away from each other may lie on two sides of a level.
        assert (torchs.pages != kernels.pages).float().mean() < 2e-3
        for ours, theirs in zip(kernels.tensors()[1:], torchs.tensors()[1:], strict=True):
            assert relative(ours, theirs) < 3e-3


@on_cpu
def test_what_kernels_store_does_not_depend_on_how_rows_arrive():
    model = tiny(num_hidden_layers=1)
    keys, values = torch.randn(2, 2, 90, 32)
    stored = []
    with host_of(model, kernels=True) as host:
        for sizes in ([90], [1, 1, 88], [9, 73, 1, 1, 6]):
            layer = host.new_cache().quantized()[0]
            layer.lazy_initialization(torch.zeros(1, 2, 0, 32), torch.zeros(1, 2, 0, 32))
            request, turns = layer.requests[0], Turns(ByQuery(), WINDOWS)
            for k, v in zip(keys.split(sizes, 1), values.split(sizes, 1), strict=True):
                turn = turns.of(0, request.length, k.shape[1])
                request.take(k, v, turn, causal=True).close()
            stored.append(request.tensors())
    for other in stored[1:]:
        assert torch.equal(stored[0][0], other[0])
        # The interpreter's products end in other bits for tiles of other sizes.
        for ours, theirs in zip(other[1:], stored[0][1:], strict=True):
            assert relative(ours, theirs) < 1e-6


@on_cpu
def test_kernels_are_launched_on_the_device_of_the_model(monkeypatch):
    # Triton takes the current device, which need not be that of the model.
    from kvcq.runtime.hf import kernel_rows

    inside, launched = [], set()

    class Recorded(torch.cuda.device_of):
        def __enter__(self):
            inside.append(self)

        def __exit__(self, *error):
            inside.pop()

    monkeypatch.setattr(torch.cuda, "device_of", Recorded)

    def launch(name, real, *args, **options):
        assert inside, name
        launched.add(name)
        return real(*args, **options)

    for name in ("write", "store_windows", "map_queries", "extend"):
        monkeypatch.setattr(kernel_rows, name, partial(launch, name, getattr(kernel_rows, name)))
    model = one_head()
    with host_of(model, kernels=True) as host:
        run(model, host.new_cache(), tiny_tokens(12), [10, 1, 1])
    assert launched == {"write", "store_windows", "map_queries", "extend"}


@on_cpu
@pytest.mark.parametrize(
    "semantics",
    [
        Served(),
        Served(40, (Boundary(20, "carried"), Boundary(32, "cached"))),
        Served(43, (Boundary(32, "carried"),)),
        Deferred(),
    ],
    ids=["live", "cached", "one token of a chunk", "deferred"],
)
def test_semantics_are_those_of_torch(semantics):
    # One token of a chunk reads further back than the window: it is no decode step.
    model, tokens = one_head(), tiny_tokens(43)
    logits = []
    for host in both(model):
        with host:
            logits.append(run(model, host.new_cache(semantics), tokens, [20, 12, 8, 1, 2]))
    assert relative(logits[1], logits[0]) < 1e-3


@on_cpu
def test_caches_are_cropped_copied_and_selected_as_in_torch():
    model, tokens = one_head(), tiny_tokens(40)
    found = []
    for host in both(model):
        with host:
            cache, logits = host.new_cache(), []
            logits.append(run(model, cache, tokens[:30]))
            cache.crop(-12)
            twin = copy.deepcopy(cache)
            logits += [run(model, each, tokens[18:22], [3, 1]) for each in (cache, twin)]
            twin.batch_repeat_interleave(3)
            step = torch.stack([tiny_tokens(1, seed=seed) for seed in range(3)])
            logits.append(run(model, twin, step))
            twin.reorder_cache(torch.tensor([2, 0, 0]))
            logits.append(run(model, twin, step))
            twin.batch_select_indices(torch.tensor([True, False, True]))
            logits += [run(model, twin, step[:2]), run(model, cache, step[:1])]
            assert {request.length for request in requests(cache)} == {23}
            found.append((logits, twin.allocated_bytes()))
    assert found[0][1] == found[1][1]
    for ours, theirs in zip(found[1][0], found[0][0], strict=True):
        assert relative(ours, theirs) < 1e-3


@on_cpu
def test_padding_and_hidden_tokens_are_answered_as_in_torch():
    model, tokens = one_head(), tiny_tokens(60).view(2, 30)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, :13] = 0
    hidden = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    # No rule of positions hides a token in the middle: that forward is torch's, over what the kernels have stored.
    hidden[0, 20] = 0
    logits = []
    for host in both(model):
        with host:
            cache = host.new_cache()
            whole = batch_forward(model, cache, tokens[:, :29], mask[:, :29])[mask[:, :29].bool()]
            parts = [batch_forward(model, cache, tokens[:, 29:], shown) for shown in (mask, hidden)]
            logits.append((whole, *parts))
    for ours, theirs in zip(*logits, strict=True):
        assert relative(ours, theirs) < 1e-3


@on_cpu
def test_models_in_half_precision_keep_exact_rows_in_it():
    model, tokens = tiny(dtype=torch.float16, num_hidden_layers=1), tiny_tokens(30)
    logits = []
    for host in both(model, cast=torch.bfloat16):
        with host:
            cache = host.new_cache()
            logits.append(run(model, cache, tokens, [25, 1, 3, 1]))
            assert requests(cache)[0].ring[0].dtype == (torch.float16 if logits[1:] else torch.bfloat16)
    assert relative(logits[1], logits[0]) < 0.15


@on_cpu
def test_pages_are_held_ahead_in_proportion_and_not_beyond_what_is_expected():
    model, plan = tiny(num_hidden_layers=1), [LayerPlan(layer=0, k=INT2, v=INT2)]
    keys, values = torch.randn(2, 2, 64, 32)
    with host_of(model, cast=torch.bfloat16, kernels=True) as host:
        rooms = []
        for expected in (None, 64 * 41):
            cache = host.new_cache()
            if expected is not None:
                cache.expect(expected)
            layer = cache.quantized()[0]
            layer.lazy_initialization(torch.zeros(1, 2, 0, 32), torch.zeros(1, 2, 0, 32))
            request, seen, ahead = layer.requests[0], [], []
            for tokens in range(64, 64 * 42, 64):
                request.append(keys, values)
                seen.append(request.stored().pages.data_ptr())
                exact = (WINDOWS.sink + WINDOWS.recent + 64) * 2 * 64 * 2
                coded = 8 * (cache.allocated_bytes() - 2 * exact) / (tokens * 2 * 64)
                bits = bits_per_element(plan, plan_geometry(model), WINDOWS, tokens)
                # Served rows are of two bytes; this model's are of four.
                assert coded == bits.codes + bits.metadata
                ahead.append(request.ahead_bytes() / request.pages.nbytes)
                assert expected is None or request.stored().pages.shape[0] <= 41
            rooms.append(len(set(seen)))
            assert 0 < max(ahead) <= 1 / 8
            request.crop(64 * 3)
            assert request.ahead_bytes() == 0 and not request.clone().ahead_bytes()
        # Eight pages come one at a time; from then on every copy makes room for an eighth more.
        assert max(rooms) < 30


@on_cpu
def test_what_reads_a_cache_is_told_with_the_reason():
    model = tiny(num_hidden_layers=2)
    for options, line in {
        (): "torch for 2 layers (the model is on cpu)",
        (("kernels", False),): "torch for 2 layers (kernels are switched off)",
        (("mode", "simulate"),): "torch for 2 layers (mode simulate)",
    }.items():
        with host_of(model, **dict(options)) as host:
            assert host.new_cache().kernels == line
    with host_of(model, kernels=True) as host:
        assert host.new_cache().kernels.startswith("triton for 2 layers (")
    geometry = plan_geometry(model)
    codecs = codecs_of(model, VQ, INT2)
    # Coordinates that snapping would change are not those of the codec.
    codecs[1].k.words.mul_(0.5)
    codecs[1].k.words[..., 0, 0] *= 0.9
    with pytest.raises(UnsupportedError, match=r"no kernels: a codebook is not in steps .*layer 1"):
        Host(model, codecs, geometry, WINDOWS, kernels=True)
    with pytest.raises(UnsupportedError, match="layer 0"):
        host_of(tiny(num_hidden_layers=1, head_dim=40), kernels=True)


def test_what_writes_is_told_where_it_is_something_else():
    both, keys = (LayerKernels("triton", "4 scales a row", None, writer) for writer in ("triton", "cuda (keys)"))
    line = describe({0: both, 1: keys, 2: both})
    assert line == "triton for 2 layers (4 scales a row); triton for 1 layer (4 scales a row), written by cuda (keys)"


@on_cpu
@pytest.mark.exhaustive
def test_a_bundle_is_proven_to_be_on_with_kernels_and_takes_the_bytes_of_the_layout(tmp_path):
    world = make_world(tmp_path / "world", ("nova",))
    bundle = open_bundle(world.pack("nova", tmp_path / "nova.kvcq"))
    model = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float16)
    with open_host(bundle, model, kernels=True) as host:
        assert prove(bundle, host).statistic == pytest.approx(1, abs=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen2"])
@pytest.mark.parametrize("pair", ["int2", "grouped keys", "vq"])
def test_on_a_gpu_kernels_are_chosen_and_answer_as_torch_does(family, pair):
    model, tokens = tiny(family, torch.bfloat16, **shallow(family)).cuda(), tiny_tokens(400)
    logits = []
    for wanted in (False, None):
        codecs = {
            layer.layer: codec_of(layer, *PAIRS[pair], cast=torch.bfloat16, device="cuda")
            for layer in plan_geometry(model).quantizable()
        }
        with Host(model, codecs, plan_geometry(model), WINDOWS, kernels=wanted) as host:
            cache = host.new_cache()
            assert cache.kernels.startswith("torch") == (wanted is False)
            logits.append(run(model, cache, tokens, [300, 1, 1, 97, 1]))
    # With one quantized layer both code the same rows; what differs is roundings to bfloat16, of mapped queries and of
    # outputs: 5e-3 to 9e-3 of a token's logits, 5e-5 of divergence, where torch is rounded in their place. Deeper
    # layers would code rows that differ, and a code on the other side of a level is an error of a whole step: up to
    # 0.1 after four layers. One token in twenty may be far off: a router that is near a border takes other experts.
    ours, theirs = logits[1].double()[0], logits[0].double()[0]
    apart = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    assert apart.quantile(0.95) < 2e-2
    right = theirs.log_softmax(-1)
    divergence = (right.exp() * (right - ours.log_softmax(-1))).sum(-1)
    assert divergence.mean() < 1e-3
