from __future__ import annotations

import json
import sys

import pytest

from kvcq.errors import InputError
from kvcq.pipeline.sglang.arguments import Given, build_command, read_given
from kvcq.pipeline.sglang.request import SglangRequest


def request(**options):
    return SglangRequest(bundle="a.kvcq", model="m", **options)


def last(command, name):
    """The value that argparse takes: that of the last occurrence."""
    places = [i for i, token in enumerate(command) if token == name]
    return command[places[-1] + 1]


def test_flags_are_read_by_field():
    given = read_given(
        [
            "--tp",
            "2",
            "--log-level=info",
            "--enable-x",
            "--cuda-graph-bs",
            "1",
            "2",
            "4",
            "--mem-fraction-static",
            "0.8",
        ]
    )
    assert given.values == {
        "tp_size": 2,
        "log_level": "info",
        "enable_x": True,
        "cuda_graph_bs": (1, 2, 4),
        "mem_fraction_static": "0.8",
    }
    assert read_given(["--tensor-parallel-size", "4"]).number("tp_size", 1) == 4
    assert read_given([]) == Given((), {})


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["info"], "not a flag"),
        (["--page-size", "32"], "leave it out: it is 64"),
        (["--page-size=1"], "leave it out: it is 64"),
        (["--attention-backend", "triton"], "leave it out: it is kvcq"),
        (["--model-path", "x"], "use --model, before --"),
        (["--max-running-requests", "9"], "use --max-running, before --"),
        (["--context-length", "9"], "use --max-context, before --"),
        (["--port", "9"], "use --port, before --"),
        (["--config", "x.yaml"], "a file could contradict"),
        (["--disable-radix-cache"], "reads a prefix"),
        (["--ssl-keyfile", "k"], "plain HTTP"),
        (["--grpc-mode"], "over HTTP"),
        (["--dp", "2"], "share no prefix"),
        (["--nnodes", "2"], "one machine"),
        (["--tokenizer-worker-num", "2"], "before the proof"),
        (["--enable-http2"], "before the proof"),
        (["--grpc-port", "9"], "before the proof"),
        (["--json-model-override-args", "{"], "not a JSON object"),
        (["--json-model-override-args", "[1]"], "not a JSON object"),
        (["--json-model-override-args"], "not a JSON object"),
        (["--json-model-override-args", '{"kvcq": {}}'], "is set by kvcq serve"),
    ],
)
def test_what_contradicts_is_refused(tokens, words):
    with pytest.raises(InputError, match=words):
        read_given(tokens)


@pytest.mark.parametrize("value", ["two", "0", "-1"])
def test_a_number_must_be_one(value):
    with pytest.raises(InputError, match="--tp-size"):
        read_given(["--tp-size", value]).number("tp_size", 1)


def test_the_same_values_as_those_that_are_set_are_no_contradiction():
    assert read_given(["--page-size", "64", "--attention-backend", "kvcq", "--dp-size", "1"]).tokens


def test_what_kvcq_sets_comes_last_and_the_users_overrides_stay():
    given = read_given(["--page", "32", "--json-model-override-args", '{"b": 1, "a": {"c": null}}', "--tp", "2"])
    told = build_command(
        request(host="::1", served_name="n", max_context=4096, revision="r", trust_remote_code=True, dtype="bfloat16"),
        given,
        "/models/m",
        7,
        {"bundle": "/x", "digest": "d"},
    )
    assert told[:6] == (sys.executable, "-m", "sglang.launch_server", "--page", "32", "--json-model-override-args")
    pairs = {
        "--model-path": "/models/m",
        "--revision": "r",
        "--host": "::1",
        "--port": "7",
        "--served-model-name": "n",
        "--context-length": "4096",
        "--dtype": "bfloat16",
        "--max-running-requests": "64",
        "--page-size": "64",
        "--attention-backend": "kvcq",
    }
    assert {name: last(told, name) for name in pairs} == pairs
    assert json.loads(last(told, "--json-model-override-args")) == {
        "a": {"c": None},
        "b": 1,
        "kvcq": {"bundle": "/x", "digest": "d"},
    }
    assert told[-3:] == ("--enable-metrics", "--skip-server-warmup", "--trust-remote-code")
    # An abbreviation, which argparse takes too, comes before what kvcq sets.
    assert told.index("--page") < told.index("--page-size")


def test_graphs_of_prefills_are_off_unless_a_kind_is_asked_for():
    def ends(*tokens, **more):
        told = build_command(request(), read_given(tokens), "m", 1, {}, **more)
        return [part for part in told if "prefill" in part or "piecewise" in part or part == "disabled"]

    assert ends() == ["--cuda-graph-backend-prefill", "disabled"]
    assert ends(release="0.5.14") == ends(release="0.5.17") == ends()
    for release in ("0.5.13", "0.5.13.post1"):
        assert ends(release=release) == ["--disable-piecewise-cuda-graph"]
    assert ends("--cuda-graph-backend-prefill", "breakable") == ["--cuda-graph-backend-prefill"]
    assert ends("--enable-breakable-cuda-graph", release="0.5.13") == []


def test_what_is_not_asked_for_is_not_passed():
    told = build_command(request(), Given(), "m", 1, {})
    for name in ("--revision", "--served-model-name", "--chat-template", "--context-length", "--trust-remote-code"):
        assert name not in told
