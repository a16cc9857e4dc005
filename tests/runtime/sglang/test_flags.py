"""Arguments and variables of a user, and the table of flags against every supported release of SGLang."""

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvcq.errors import InputError
from kvcq.runtime.sglang.flags import PLUGINS, RULES, SIZES, SWITCHES, environment, parse
from kvcq.runtime.sglang.refusals import refusals
from tests.runtime.sglang.stated import ARGS, MODEL, flags_of, served, spellings
from tests.runtime.sglang.wheels import FACTS, VERSIONS, Sources

# Legal only when they are set: the defaults of SGLang are refused.
SET = {"attention_backend", "page_size", "max_running_requests"}


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


def test_the_wheels_are_named_once():
    names = json.loads((Path(__file__).parent / "wheel_facts.json").read_text(encoding="utf-8"))["wheels"]
    assert tuple(names) == VERSIONS and all(len(value) == 64 for value in names.values())
