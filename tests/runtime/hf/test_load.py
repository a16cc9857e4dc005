import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvcq
from kvcq.errors import CorruptArtifactError, InputError, KvcqError, MismatchError, UnsupportedError
from kvcq.runtime.hf.load import open_host
from kvcq.runtime.hf.semantics import Served
from kvcq.runtime.layout import bits_per_element
from tests.chain import make_world
from tests.runtime.hf.setup import CACHE, relative, run
from tests.tiny import save_tiny, tiny_model, tiny_tokens


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    world = make_world(tmp_path_factory.mktemp("load") / "world", ("nova",))
    return world.model, world.pack("nova", world.folder / "nova.kvcq")


@pytest.fixture
def model(bundle):
    return AutoModelForCausalLM.from_pretrained(bundle[0], dtype=torch.float32)


def test_a_bundle_becomes_a_cache_of_the_size_that_it_states(bundle, model):
    folder, path = bundle
    prompt = tiny_tokens(100)[None]
    with kvcq.load_cache(path, model, tokenizer=AutoTokenizer.from_pretrained(folder)) as cache:
        answer = model.generate(prompt, max_new_tokens=29, do_sample=False, **{CACHE: cache}, eos_token_id=None)
        assert answer.shape[1] == 129 and cache.get_seq_length() == 128
        manifest = kvcq.load_bundle(path).manifest
        bits = bits_per_element(manifest.plan, manifest.geometry, manifest.recipe.windows, 128)
        assert cache.allocated_bytes() == round(bits.total * 128 * 4 * 2 * 64 / 8)
        assert cache.clamped() == 0
    assert model.config._attn_implementation == "sdpa"


def test_modes_and_semantics_are_arguments(bundle, model):
    tokens = tiny_tokens(90)
    logits = {}
    for mode in ("packed", "simulate"):
        with kvcq.load_cache(bundle[1], model, mode=mode) as cache:
            logits[mode] = run(model, cache, tokens, [40, 40, 10])
            logits[mode, "served"] = run(model, cache.host.new_cache(Served()), tokens, [40, 40, 10])
    assert torch.equal(logits["packed"], logits["simulate"])
    assert torch.equal(logits["packed", "served"], logits["simulate", "served"])
    assert relative(logits["packed", "served"], logits["packed"]) > 1e-3


def test_a_model_of_other_weights_is_warned_of_and_refused_when_strict(bundle, tmp_path):
    other = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path / "other", seed=1), dtype=torch.float32)
    with pytest.warns(UserWarning, match="other weights"):
        kvcq.load_cache(bundle[1], other).close()
    with pytest.raises(MismatchError, match="other weights"):
        kvcq.load_cache(bundle[1], other, strict=True)
    assert other.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("options", [{"num_key_value_heads": 4}, {"rope_theta": 5e5}, {"num_hidden_layers": 3}])
def test_a_model_that_the_bundle_was_not_fitted_for_is_refused(bundle, options):
    with pytest.raises(MismatchError, match="fitted for another model"):
        kvcq.load_cache(bundle[1], tiny_model(**options))


def test_damage_and_wrong_modes_are_refused_before_the_model_is_touched(bundle, model, tmp_path):
    with pytest.raises(UnsupportedError, match="no mode"):
        kvcq.load_cache(bundle[1], model, mode="fast")
    broken = tmp_path / "broken.kvcq"
    broken.mkdir()
    for file in bundle[1].iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    largest = max(broken.iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[-1] ^= 1
    largest.write_bytes(data)
    with pytest.raises(CorruptArtifactError):
        kvcq.load_cache(broken, model)
    with pytest.raises(KvcqError, match="missing"):
        kvcq.load_cache(tmp_path / "missing.kvcq", model)
    assert model.config._attn_implementation == "sdpa"


def test_a_host_of_a_bundle_makes_many_caches(bundle, model):
    tokens = tiny_tokens(40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        host = open_host(bundle[1], model)
    first, second = run(model, host.new_cache(), tokens), run(model, host.new_cache(), tokens)
    host.close()
    assert torch.equal(first, second)


def test_other_things_than_bundles_models_and_semantics_are_refused_by_name(bundle, model):
    fits = bundle[1].parent / "fits"
    with pytest.raises(InputError, match="this is a fit folder, not bundle"):
        kvcq.load_cache(fits / "nova", model)
    with pytest.raises(InputError, match="str is no model"):
        kvcq.load_cache(bundle[1], str(bundle[0]))
    with pytest.raises(InputError, match=r"'served' is no semantics .*: use ByQuery, Served or Deferred"):
        kvcq.load_cache(bundle[1], model, semantics="served")
    assert model.config._attn_implementation == "sdpa"
