"""A real server process behind real HTTP: what proves that the bundle is on, and what does not."""

from __future__ import annotations

import pytest

from kvcq.errors import CorruptArtifactError, InputError, MismatchError, ResourceError, UnsupportedError
from kvcq.pipeline.serve_sglang import serve_sglang
from tests.serve_sglang.conftest import MACHINE, Told, alive, gone, request_of, serving


def test_a_server_that_proves_itself_is_told_with_a_table(tiny, stub, tmp_path):
    stub("", log=tmp_path / "argv")
    with serving(tiny, served_name="tiny") as told:
        record = told.ready.payload()
        assert told.ready.text().endswith(f"/v1 serves tiny with bundle {record['digest'][:16]}")
        assert record["canary"] == pytest.approx(1.0, abs=1e-6)
        assert (record["engine"], record["sglang"], record["capacity_tokens"]) == ("sglang", "0.5.15.post1", 6400)
        assert record["kernels"] == {str(layer): "cuda" for layer in range(4)}
    assert told.code == 0
    table = [
        line for line in told.notes if line.partition(":")[0] in ("bundle", "layers", "cache", "kernels", "canary")
    ]
    assert [line.partition(":")[0] for line in table] == ["bundle", "layers", "cache", "kernels", "canary"]
    assert table[1].startswith("layers: 0-3 (full): K group_vq 2 bit")
    assert table[3] == "kernels: cuda: 0-3"
    assert any("about" in line and "BF16 would hold" in line for line in told.notes)
    # Its own lines are shown as they come.
    assert "INFO: starting \x1b[31mred\x1b[0m" in told.notes


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("bf16_server", "the plugin is not on"),
        ("not_sglang", "not an answer of SGLang"),
        ("no_states", "says nothing of its schedulers"),
        ("digest", "the digest of the bundle"),
        ("bytes", "bytes of a token"),
        ("window", "bytes of the exact rows"),
        ("kernels", "a kernel for each layer"),
        ("slow_kernel", "layer 0 attends with torch"),
        ("capacity", "a pool of 0 tokens"),
        ("fallback", "attention without the kernels"),
        ("late_fallback", "attention without the kernels"),
        ("bf16", "does not answer as this bundle does: canary 0.00"),
        ("no_cache", "0 tokens of the canary were read from the cache, not 128"),
        ("no_cap", "a repeated prompt of 193 tokens reused 192, not 128"),
        ("not_finite", "incomplete or not finite"),
        ("few", "log-probs are incomplete"),
        ("error", "HTTP 500"),
        ("dies", "the bundle changed on disk"),
    ],
)
def test_a_server_that_does_not_prove_itself_is_ended(tiny, stub, way, words):
    stub(way)
    told = Told()
    with pytest.raises(MismatchError) as caught:
        serve_sglang(request_of(tiny, "--log-level", "info"), told, pytest.fail, machine=MACHINE)
    assert words in str(caught.value)
    assert caught.value.exit_code == 5


@pytest.mark.parametrize(
    ("way", "kind", "words"),
    [
        ("no_plugin", MismatchError, "did not load the plugin: argument --attention-backend: invalid choice: 'kvcq'"),
        ("not_loaded", MismatchError, "did not load the plugin: SGLang '0.5.99' is outside"),
        ("plugin_refuses", InputError, "MLA is not served"),
        ("plugin_corrupt", CorruptArtifactError, "the bundle is damaged"),
        ("scheduler2", InputError, "no kernels: the codebook has other steps (layer 0): serve it elsewhere"),
        ("scheduler5", MismatchError, "no kernels: the codebook has other steps (layer 0): serve it elsewhere"),
        ("scheduler6", ResourceError, "no kernels: the codebook has other steps (layer 0): serve it elsewhere"),
        ("scheduler-9", MismatchError, "no kernels: the codebook has other steps (layer 0): serve it elsewhere"),
        ("raised", UnsupportedError, "logits depend on the position (layer 3)"),
        ("rows", ResourceError, "2 GiB of exact rows"),
        ("silent", MismatchError, "exit code 3 before it was ready ("),
        ("unknown_flag", InputError, "unrecognized arguments: --nonsense"),
        ("hook", MismatchError, "the hook match_cap of SGLang 0.5.15 is not in place: install another"),
        ("memory", ResourceError, "CUDA out of memory"),
    ],
)
def test_a_server_that_ends_early_says_why(tiny, stub, way, kind, words):
    stub(way)
    with pytest.raises(kind) as caught:
        serve_sglang(request_of(tiny), Told(), pytest.fail, machine=MACHINE)
    assert type(caught.value) is kind
    # What the plugin says is a sentence of its own, and the whole of the error.
    plugin = not words.startswith(("did not load", "exit code", "unrecognized", "CUDA", "2 GiB"))
    assert str(caught.value) == words if plugin else words in str(caught.value)


def test_a_server_that_never_answers_is_given_up(tiny, stub):
    stub("hang")
    with pytest.raises(MismatchError, match=r"did not answer within 1 s"):
        serve_sglang(request_of(tiny, start_seconds=1.0), Told(), pytest.fail, machine=MACHINE)


def test_nothing_that_the_server_started_outlives_it(tiny, stub, tmp_path):
    stub("child", pid=tmp_path / "pids")
    with serving(tiny) as told:
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert all(map(alive, pids))
    assert told.code == 0
    assert gone(pids)


def test_the_exit_code_of_a_server_that_ends_later_is_passed_on(tiny, stub):
    stub("crash_later")
    told = Told()
    assert serve_sglang(request_of(tiny), told, lambda _: None, machine=MACHINE) == 9
    assert "ended" in told.notes


def test_a_server_that_wants_a_key_is_asked_with_it(tiny, stub):
    stub("")
    with serving(tiny, "--api-key", "secret") as told:
        assert told.ready.payload()["canary"] > 0.9


def test_a_listener_that_fails_does_not_leave_the_server(tiny, stub, tmp_path):
    stub("child", pid=tmp_path / "pids")

    def broken(_):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        serve_sglang(request_of(tiny), Told(), broken, machine=MACHINE)
    assert not any(alive(pid) for pid in (tmp_path / "pids").read_text().split())
