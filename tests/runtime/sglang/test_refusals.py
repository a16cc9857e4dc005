"""Every refusal by name, and the table of flags against every supported release of SGLang."""

import ast
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvcq.errors import InputError, UnsupportedError
from kvcq.runtime.sglang.facts import TRAITS, ModelFacts, model_facts
from kvcq.runtime.sglang.flags import PLUGINS, RULES, SIZES, SWITCHES, environment, parse
from kvcq.runtime.sglang.refusals import refusals, refuse
from kvcq.spec.geometry import LayerGeometry, ModelGeometry, RopeSpec
from kvcq.spec.plan import LayerPlan
from tests.runtime.sglang.wheels import FACTS, VERSIONS, Sources

ARGS = "sglang.srt.server_args.ServerArgs"
# Legal only when they are set: the defaults of SGLang are refused.
SET = {"attention_backend", "page_size", "max_running_requests"}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 256,
    "head_dim": 32,
    "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def served(**changes):
    """Arguments that are served, with changes."""
    fields = {rule.field: rule.legal[0] for rule in RULES}
    return SimpleNamespace(**{**fields, "max_running_requests": 64, "tp_size": 1, **changes})


def frequencies(theta=10000.0, dims=32):
    return tuple(theta ** (-2 * index / dims) for index in range(dims // 2))


def geometry(layers=2, rope=None, **changes):
    fields = {"kind": "full", "q_heads": 8, "kv_heads": 4, "d_k": 32, "d_v": 32, "rope": 0, **changes}
    rope = rope or RopeSpec(rotary_dims=32, inv_freq=frequencies())
    made = tuple(LayerGeometry(layer=layer, **fields) for layer in range(layers))
    return ModelGeometry(model_type="llama", hidden_size=256, vocab_size=128, ropes=(rope,), layers=made)


MODEL = model_facts(CONFIG)


def flags_of(found):
    return [refusal.flag.split()[0] for refusal in found]


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


@pytest.mark.parametrize(
    ("trait", "changes"),
    [
        ("mla", {"kv_lora_rank": 512}),
        ("linear", {"layer_types": ["linear_attention", "full_attention"]}),
        ("linear", {"mamba_d_state": 16}),
        ("linear", {"layers_block_type": ["mamba", "attention"]}),
        ("sliding", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("sliding", {"sliding_window": 4096}),
        ("chunked", {"attention_chunk_size": 8192}),
        ("encoder", {"is_encoder_decoder": True}),
        ("images", {"vision_config": {"depth": 2}}),
        ("heads", {"global_head_dim": 512}),
        ("heads", {"swa_head_dim": 64}),
        ("heads", {"swa_num_key_value_heads": 2}),
        ("heads", {"num_global_key_value_heads": 8}),
        ("heads", {"head_dim": None, "swa_head_dim": 64}),
        ("heads", {"num_key_value_heads": None, "swa_num_key_value_heads": 4}),
        ("heads", {"num_key_value_heads": [4, 2]}),
        ("heads", {"num_key_value_heads": (4, 4)}),
        ("heads", {"block_configs": [{"attention": {"n_heads_in_group": 8}}]}),
        ("sparse", {"dual_chunk_attention_config": {"chunk_size": 8}}),
        ("listed", {"architectures": ["Llama4ForCausalLM"]}),
    ],
)
def test_a_configuration_shows_its_traits(trait, changes):
    assert model_facts({**CONFIG, **changes}).traits == {trait}


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": 4096, "layer_types": ["full_attention", "full_attention"]},
        {"is_encoder_decoder": False, "attention_chunk_size": None},
        {"num_experts": 8, "vision_config": None},
        # SGLang adds these to every configuration, with the numbers of all layers.
        {"swa_head_dim": 32, "swa_num_key_value_heads": 4},
        {"head_dim": None, "swa_head_dim": 32},
        {"num_key_value_heads": None, "swa_num_key_value_heads": 8},
        {"swa_head_dim": None, "global_head_dim": 0, "num_global_key_value_heads": None},
        {"block_configs": None},
    ],
)
def test_a_plain_model_has_no_traits(changes):
    assert model_facts({**CONFIG, **changes}).traits == frozenset()


def test_a_configuration_without_an_architecture_is_refused_with_the_way_to_name_it():
    found = refusals(served(), model_facts({**CONFIG, "architectures": None}))
    assert [refusal.flag for refusal in found] == ["llama config.json"]
    assert "--json-model-override-args" in found[0].remedy


def test_a_text_model_inside_a_larger_configuration_is_the_one_that_counts():
    inner = {**CONFIG, "num_hidden_layers": 7}
    found = model_facts(
        {"architectures": ["Net"], "model_type": "net", "text_config": inner, "vision_config": {"a": 1}}
    )
    assert (found.name, found.layers, found.traits) == ("Net", 7, {"images"})


def test_what_sglang_itself_sees_is_added():
    seen = SimpleNamespace(
        attention_arch=SimpleNamespace(name="MLA"),
        is_hybrid_swa=True,
        is_local_attention_model=True,
        is_encoder_decoder=True,
        is_multimodal=True,
        dtype="torch.float16",
    )
    found = model_facts(CONFIG, seen)
    assert found.traits == {"mla", "sliding", "chunked", "encoder", "images"} and found.dtype == "float16"
    plain = SimpleNamespace(attention_arch=SimpleNamespace(name="MHA"), is_multimodal=False, dtype="torch.bfloat16")
    assert model_facts(CONFIG, plain) == MODEL


def test_heads_and_sizes_default_as_in_models():
    found = model_facts({**CONFIG, "num_key_value_heads": None, "head_dim": None})
    assert (found.kv_heads, found.d_k, found.d_v) == (8, 32, 32)
    assert model_facts({**CONFIG, "v_head_dim": 64}).d_v == 64


@pytest.mark.parametrize(
    ("stated", "model_type", "runs"),
    [
        ("bfloat16", "llama", "bfloat16"),
        ("float16", "llama", "float16"),
        ("float32", "llama", "float16"),
        (None, "llama", "float16"),
        ("float32", "gemma2", "bfloat16"),
    ],
)
def test_the_dtype_that_sglang_would_pick_is_refused_unless_it_is_bfloat16(stated, model_type, runs):
    model = model_facts({**CONFIG, "dtype": stated, "model_type": model_type})
    assert model.dtype == runs
    assert flags_of(refusals(served(), model)) == ([] if runs == "bfloat16" else ["--dtype"])
    assert refusals(served(dtype="bfloat16"), model) == ()


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


def test_older_spellings_of_rotary_settings_read_the_same():
    old = {key: value for key, value in CONFIG.items() if key != "rope_parameters"}
    assert model_facts({**old, "rope_theta": 10000.0}).rope == MODEL.rope
    scaled = model_facts({**old, "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert dict(scaled.rope) == {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    assert (
        model_facts({**old, "rope_theta": 10000.0, "partial_rotary_factor": 0.5}).rope["partial_rotary_factor"] == 0.5
    )


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


def test_variables_are_read_as_sglang_reads_them():
    def holding(value):
        return SimpleNamespace(get=lambda: value)

    envs = SimpleNamespace(SGLANG_USE_HND_KVCACHE=holding(True), SGLANG_PLUGINS=holding(None))
    assert environment(envs) == {"SGLANG_USE_HND_KVCACHE": "True", "SGLANG_PLUGINS": ""}
    assert [found.flag for found in refusals(served(), MODEL, environment=environment(envs))] == [
        "SGLANG_USE_HND_KVCACHE"
    ]


def test_arguments_of_a_user_are_read_without_sglang():
    argv = "--tp 2 --kv-cache-dtype=fp8_e5m2 --enable-mixed-chunk --page-size 16 --host ::1 --lora-paths a=b c=d"
    found = parse([*argv.split(), "--max-running-requests", "many", "--attention-context-parallel-size", "2"])
    assert vars(found) == {
        "tp_size": 2,
        "kv_cache_dtype": "fp8_e5m2",
        "enable_mixed_chunk": True,
        "page_size": 16,
        "lora_paths": "a=b c=d",
        "max_running_requests": "many",
        "attn_cp_size": 2,
    }
    refused = "--attn-cp-size --enable-mixed-chunk --kv-cache-dtype --lora-paths --max-running-requests --page-size"
    assert sorted(flags_of(refusals(found, MODEL))) == refused.split()


def test_arguments_that_are_served_pass_unread():
    found = parse(["--mem-fraction-static", "0.8", "--max-running-requests", "64", "--tensor-parallel-size", "4"])
    assert refusals(found, MODEL) == ()


@pytest.mark.parametrize("argv", [["--enable"], ["--enable-mixed-chunk=yes"]])
def test_arguments_that_no_parser_takes_are_one_line(argv):
    with pytest.raises(InputError, match="arguments for SGLang") as caught:
        parse(argv)
    assert "\n" not in str(caught.value)


def spellings(sources):
    """Every flag of a release: those of its parser, and those that its annotated fields become."""
    found = set()
    for name, node in sources.fields(ARGS).items():
        text = ast.unparse(node.annotation)
        if text.startswith("A[") and "no_cli=True" not in text:
            found.add("--" + name.replace("_", "-"))
        for call in ast.walk(node.annotation):
            for word in getattr(call, "keywords", ()):
                if word.arg == "aliases":
                    found |= set(ast.literal_eval(word.value))
    for call in ast.walk(sources.find(f"{ARGS}.add_cli_args")):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("add_argument"):
            found |= {argument.value for argument in call.args if isinstance(argument, ast.Constant)}
    return {flag for flag in found if isinstance(flag, str) and flag.startswith("--")}


def test_the_default_of_every_ruled_field_is_served(sources):
    for name, node in sources.fields(ARGS).items():
        rule = next((rule for rule in RULES if rule.field == name), None)
        if rule is not None and name not in SET:
            assert ast.literal_eval(node.value) in rule.legal, name


def test_every_value_that_a_rule_names_is_a_choice_of_the_release(sources):
    for name in ("kv_cache_dtype", "dtype", "kv_canary", "disaggregation_mode"):
        text = sources.text("sglang.srt.server_args")
        for legal in next(rule for rule in RULES if rule.field == name).legal:
            assert legal is None or f'"{legal}"' in text, (name, legal)


def test_no_flag_of_a_release_is_mistaken_for_one_that_is_refused(sources):
    ours = {flag for rule in (*RULES, *SIZES) for flag in (rule.flag, *rule.aliases)}
    for flag in spellings(sources) - ours:
        assert not [other for other in ours if other.startswith(flag)], flag


def test_every_field_of_a_release_is_refused_or_known_to_be_harmless(sources):
    harmless = {name for names in FACTS["harmless_fields"].values() for name in names.split()}
    ruled = {rule.field for rule in (*RULES, *SIZES)}
    assert not harmless & ruled
    assert set(sources.fields(ARGS)) - ruled - harmless == set()


@pytest.mark.network
def test_every_rule_is_a_field_and_its_flag_a_flag_of_some_release():
    every = [Sources(version) for version in VERSIONS]
    fields = {name for sources in every for name in sources.fields(ARGS)}
    flags = {flag for sources in every for flag in spellings(sources)}
    for rule in (*RULES, *SIZES):
        assert rule.field in fields
        assert {rule.flag, *rule.aliases} <= flags, rule


@pytest.mark.network
def test_every_variable_is_read_by_some_release():
    text = "".join(Sources(version).text("sglang.srt.environ") for version in VERSIONS)
    assert [name for name in (*SWITCHES, PLUGINS) if f"    {name} = Env" not in text] == []


def test_real_configurations_are_read_as_their_models_are():
    qwen = {
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 128,
        "hidden_size": 4096,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
    }
    found = model_facts(json.loads(json.dumps(qwen)))
    assert (found.layers, found.q_heads, found.kv_heads, found.d_k, found.dtype) == (36, 32, 8, 128, "bfloat16")
    assert found.traits == frozenset() and dict(found.rope) == {"rope_type": "default", "rope_theta": 1000000}


def test_the_wheels_are_named_once():
    names = json.loads((Path(__file__).parent / "wheel_facts.json").read_text(encoding="utf-8"))["wheels"]
    assert tuple(names) == VERSIONS and all(len(value) == 64 for value in names.values())
