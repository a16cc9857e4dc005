"""Every refusal by name."""

import math

import pytest

from kvcq.errors import UnsupportedError
from kvcq.runtime.sglang.facts import TRAITS, ModelFacts, model_facts
from kvcq.runtime.sglang.flags import PLUGINS, RULES, SWITCHES
from kvcq.runtime.sglang.refusals import refusals, refuse
from kvcq.spec.geometry import RopeSpec
from kvcq.spec.plan import LayerPlan
from tests.runtime.sglang.stated import CONFIG, MODEL, flags_of, frequencies, geometry, served


def test_what_is_served_is_not_refused():
    assert refusals(served(), MODEL, geometry=geometry(), environment={}) == ()
    refuse(())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.field)
def test_every_flag_is_refused_by_name_with_its_reason_and_what_is_legal(rule):
    value = {"switch": True, "text": "something", "number": 7}[rule.kind]
    found = refusals(served(**{rule.field: value}), MODEL)
    assert flags_of(found) == [rule.flag]
    assert found[0].reason == rule.reason and rule.flag in found[0].remedy
    for legal in rule.legal:
        assert refusals(served(**{rule.field: legal}), MODEL) == ()
    with pytest.raises(UnsupportedError) as caught:
        refuse(found)
    line = str(caught.value)
    assert rule.reason in line and rule.flag in line and "--engine hf" in line and caught.value.exit_code == 2


def test_the_line_holds_the_first_refusal_and_says_how_many_more_there_are():
    found = refusals(served(page_size=1, enable_mixed_chunk=True, kv_cache_dtype="fp8_e5m2"), MODEL)
    with pytest.raises(UnsupportedError, match=r"a page is one block .*, and 2 more \(--page-size 1\)"):
        refuse(found)


def test_a_switch_does_not_pass_for_the_number_one():
    assert flags_of(refusals(served(pp_size=True), MODEL)) == ["--pp-size"]


@pytest.mark.parametrize("count", [None, 0, -1, 4097, "many", 2.0])
def test_the_number_of_running_requests_must_be_set_and_fit(count):
    found = refusals(served(max_running_requests=count), MODEL)
    assert flags_of(found) == ["--max-running-requests"] and "1 to 4096" in found[0].remedy


def test_ranks_share_heads_or_repeat_them():
    for ranks in (1, 2, 4, 8):
        assert refusals(served(tp_size=ranks), MODEL) == ()
        assert refusals(served(tp_size=ranks), None, geometry=geometry()) == ()
    for ranks in (0, 3, 16, "two"):
        found = refusals(served(tp_size=ranks), MODEL)
        assert flags_of(found) == ["--tp-size"] and found[0].remedy == "--tp-size 1 or 2 or 4 or 8"
        assert "8 query heads and 4 KV heads" in found[0].reason
        assert refusals(served(tp_size=ranks), None, geometry=geometry()) == found


def test_flags_and_layers_are_refused_before_the_model_is_known():
    rope = RopeSpec(rotary_dims=32, inv_freq=frequencies(), regime="longrope:short")
    plan = [LayerPlan(layer=0, reason="kept")]
    found = refusals(served(page_size=1), None, geometry=geometry(rope=rope), plan=plan, environment={PLUGINS: "x"})
    assert flags_of(found) == ["--page-size", "layers", "RoPE", PLUGINS]
    assert refusals(served(), None, geometry=geometry(kind="sliding", window=8, kv_heads=0)) == ()


@pytest.mark.parametrize("trait", TRAITS)
def test_every_kind_of_model_is_refused_with_its_reason(trait):
    model = ModelFacts("Net", 2, 8, 4, 32, 32, traits=frozenset({trait}))
    found = refusals(served(), model)
    assert [(refusal.flag, refusal.reason) for refusal in found] == [("Net", TRAITS[trait])]


@pytest.mark.parametrize("field", ["q_heads", "kv_heads", "d_k", "d_v"])
def test_a_bundle_of_another_shape_is_refused_with_both_numbers(field):
    # Fewer turned channels than the smallest head: only the shape differs.
    rope = RopeSpec(rotary_dims=16, inv_freq=frequencies(dims=16))
    changed = geometry(rope=rope, **{field: {"q_heads": 16, "kv_heads": 2, "d_k": 64, "d_v": 64}[field]})
    found = refusals(served(), MODEL, geometry=changed)
    assert found[0].flag == "layer 0" and field in found[0].reason
    assert str(getattr(changed.layers[0], field)) in found[0].reason


def test_a_bundle_of_another_depth_or_with_other_layers_is_refused():
    assert "fitted on 3 layers, the model has 2" in refusals(served(), MODEL, geometry=geometry(3))[0].reason
    sliding = geometry(kind="sliding", window=128)
    assert "sliding attention" in refusals(served(), MODEL, geometry=sliding)[0].reason


def test_a_layer_that_stays_bf16_is_refused():
    plan = [LayerPlan(layer=layer, reason="kept") for layer in range(12)]
    found = refusals(served(), MODEL, plan=plan)
    assert [refusal.flag for refusal in found] == ["layers 0, 1, 2, 3, 4, 5, 6, 7, ..."]


def test_other_rotary_settings_are_refused():
    other = model_facts({**CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}})
    assert "rope_theta 500000.0" in refusals(served(), other, geometry=geometry())[0].reason
    scaled = model_facts({**CONFIG, "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}})
    found = refusals(served(), scaled, geometry=geometry())
    assert "fitted with default positions, the model has yarn" in found[0].reason and "overrides" in found[0].remedy
    partial = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    assert refusals(served(), model_facts({**CONFIG, "rope_parameters": partial}), geometry=geometry())
    half = RopeSpec(rotary_dims=16, inv_freq=frequencies(dims=16))
    assert not refusals(served(), model_facts({**CONFIG, "rope_parameters": partial}), geometry=geometry(rope=half))


def test_a_regime_that_follows_the_length_is_refused():
    rope = RopeSpec(rotary_dims=32, inv_freq=frequencies(), regime="longrope:short")
    found = refusals(served(), MODEL, geometry=geometry(rope=rope))
    assert "longrope:short" in found[0].reason


def test_frequencies_that_differ_in_their_last_bits_are_the_same():
    near = tuple(math.nextafter(value, 2.0) * (1 + 1e-6) for value in frequencies())
    assert not refusals(served(), MODEL, geometry=geometry(rope=RopeSpec(rotary_dims=32, inv_freq=near)))


@pytest.mark.parametrize("name", SWITCHES)
def test_variables_that_replace_the_pool_are_refused(name):
    for value in ("1", "true", "YES"):
        assert [refusal.flag for refusal in refusals(served(), MODEL, environment={name: value})] == [name]
    for value in ("", "0", "false", "False", "no"):
        assert refusals(served(), MODEL, environment={name: value}) == ()


def test_a_list_of_plugins_must_hold_this_one():
    assert refusals(served(), MODEL, environment={PLUGINS: "other, kvcq"}) == ()
    assert refusals(served(), MODEL, environment={PLUGINS: ""}) == ()
    assert [found.flag for found in refusals(served(), MODEL, environment={PLUGINS: "other"})] == [PLUGINS]
