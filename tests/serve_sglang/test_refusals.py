"""What is refused before anything is started: each with its exit code, in one line, within five seconds."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import time
from importlib import metadata
from pathlib import Path

import pytest

from kvcq.artifacts.bundle import open_bundle
from kvcq.errors import (
    CorruptArtifactError,
    InputError,
    MismatchError,
    ResourceError,
    UnavailableError,
    UnsupportedError,
)
from kvcq.kernels import arrays
from kvcq.models.source import resolve_source
from kvcq.pipeline.serve_sglang import serve_sglang
from kvcq.pipeline.sglang import early
from kvcq.pipeline.sglang import machine as machines
from kvcq.pipeline.sglang.early import check_kernels
from kvcq.pipeline.sglang.machine import Gpu, Machine, check_gpus, cuda_devices, this_machine
from kvcq.pipeline.sglang.stated import check_stated, stated_facts
from kvcq.pipeline.sglang.vocabulary import stated_vocabulary
from tests.chain import python
from tests.serve_sglang.conftest import MACHINE, ROOT, STUB, Told, request_of
from tests.tiny import save_tiny

SECONDS = 5.0
H200 = Gpu("NVIDIA H200", 140 << 30, (9, 0))


@pytest.fixture
def refused(tiny, monkeypatch):
    """Serve, and return the error; nothing may be started."""

    def started(*_):
        raise AssertionError("a server was started")

    monkeypatch.setattr("kvcq.pipeline.sglang.running.Child", started)

    def run(kind, *arguments, machine=MACHINE, **options):
        begun = time.process_time()
        with pytest.raises(kind) as caught:
            serve_sglang(request_of(tiny, *arguments, **options), Told(), pytest.fail, machine=machine)
        assert time.process_time() - begun < SECONDS
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return run


def test_another_model_is_refused(refused, tmp_path):
    other = save_tiny(tmp_path / "other", num_hidden_layers=3)
    line = refused(MismatchError, model=str(other))
    assert "fitted for another model: num_hidden_layers is 3, that of the bundle 4 (other config.json)" in line


def test_a_model_that_differs_where_its_library_must_look_is_refused(refused, tmp_path, monkeypatch):
    monkeypatch.setattr(early, "check_stated", lambda *_: None)
    other = save_tiny(tmp_path / "other", attention_bias=True)
    assert "fitted for another model: biases differ" in refused(MismatchError, model=str(other))


def stated(tiny, tmp_path, change, overrides=None):
    """Compare a folder that holds nothing but a configuration."""
    config = json.loads((tiny.model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in (config | change).items() if v is not None}))
    check_stated(resolve_source(str(tmp_path)), overrides or {}, open_bundle(tiny.folder / "nova.kvcq"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 5}, "num_hidden_layers is 5, that of the bundle 4"),
        ({"num_attention_heads": 8}, "num_attention_heads of layer 0 is 8, that of the bundle 4"),
        ({"num_key_value_heads": 4}, "num_key_value_heads of layer 0 is 4, that of the bundle 2"),
        ({"head_dim": 16}, "head_dim of layer 0 is 16, that of the bundle 32"),
        ({"hidden_size": 32}, "hidden_size is 32, that of the bundle 64"),
        ({"rms_norm_eps": 0.5}, "rms_norm_eps is 0.5, that of the bundle"),
        ({"attention_bias": True}, "attention_bias is True, that of the bundle False"),
        ({"vocab_size": 129}, "vocab_size is 129, that of the bundle 128"),
        ({"max_position_embeddings": 1024}, "max_position_embeddings is 1024, that of the bundle 512"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, r"rope_theta is 5.0, .* 10000.0"),
        ({"rope_parameters": None, "rope_theta": 50}, "rope_theta is 50, that of the bundle 10000.0"),
        ({"rope_parameters": None, "rope_scaling": {"type": "yarn"}}, "rope_type is 'yarn', .* 'default'"),
    ],
)
def test_numbers_that_a_configuration_states_are_compared(tiny, tmp_path, change, words):
    with pytest.raises(MismatchError, match=words):
        stated(tiny, tmp_path, change)
    stated(tiny, tmp_path, {})
    with pytest.raises(MismatchError, match=words):
        stated(tiny, tmp_path, {}, change)


def test_what_a_configuration_does_not_state_waits_for_its_library(tiny, tmp_path):
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    stated(tiny, tmp_path, dict.fromkeys((*names, "hidden_size", "rope_parameters", "max_position_embeddings")))
    # One of the layers' own numbers may be that of the bundle.
    stated(tiny, tmp_path, {"head_dim": 16, "global_head_dim": 32})
    stated(tiny, tmp_path, {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}})
    inner = {"num_hidden_layers": 4, "num_attention_heads": 4}
    stated(tiny, tmp_path, {"num_hidden_layers": None, "num_attention_heads": None, "text_config": inner})
    with pytest.raises(MismatchError, match="num_hidden_layers is 7"):
        stated(tiny, tmp_path, {"text_config": {"num_hidden_layers": 7}})
    # A type of models may switch a window off, or have heads of another size, by itself.
    config = json.loads((tiny.model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 64, "global_head_dim": 64}))
    assert stated_facts(resolve_source(str(tmp_path)), {}).traits == frozenset()
    bundle = open_bundle(tiny.folder / "nova.kvcq")
    for text in ("", "[]", "{"):
        (tmp_path / "config.json").write_text(text)
        check_stated(resolve_source(str(tmp_path)), {}, bundle)
        assert stated_facts(resolve_source(str(tmp_path)), {}) is None
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4, "layer_types": 3, "hidden_size": "x"}')
    assert stated_facts(resolve_source(str(tmp_path)), {}) is None
    check_stated(resolve_source("some/model"), {}, bundle)
    assert stated_facts(resolve_source("some/model"), {}) is None


def test_a_vocabulary_is_read_without_its_library_where_that_adds_nothing(tiny, tmp_path):
    identity = open_bundle(tiny.folder / "nova.kvcq").manifest.identity
    shutil.copytree(tiny.model, folder := tmp_path / "model")
    assert stated_vocabulary(folder) == identity.vocabulary
    source, bundle = resolve_source(str(folder)), open_bundle(tiny.folder / "nova.kvcq")
    check_stated(source, {}, bundle)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for change in ({"tokenizer_class": "Qwen2Tokenizer"}, {"pad_token": {"content": "<new>"}}):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | change))
        assert stated_vocabulary(folder) is None
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    whole = json.loads((folder / "tokenizer.json").read_text())
    whole["added_tokens"].append({"id": 127, "content": "<other>"})
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(MismatchError, match=r"vocabulary differs \(model tokenizer.json\)"):
        check_stated(source, {}, bundle)
    (folder / "tokenizer.json").write_text("{")
    check_stated(source, {}, bundle)


def test_other_weights_are_refused_if_strict(refused, tmp_path):
    other = save_tiny(tmp_path / "other", seed=7)
    assert "other weights" in refused(MismatchError, model=str(other), strict=True)


def test_rope_overrides_are_refused(refused):
    text = '{"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}'
    assert "rope_theta is 5.0" in refused(MismatchError, "--json-model-override-args", text)


def test_a_damaged_bundle_is_refused(refused, tiny, tmp_path):
    copy = tmp_path / "damaged.kvcq"
    shutil.copytree(tiny.folder / "nova.kvcq", copy)
    data = bytearray((copy / "kvcq.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "kvcq.safetensors").write_bytes(data)
    refused(CorruptArtifactError, bundle=copy)


def test_a_fit_is_no_bundle(refused, tiny):
    assert "not a bundle" in refused(InputError, bundle=tiny.fits["nova"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--speculative-algorithm", "EAGLE"), "--speculative-algorithm"),
        (("--enable-hierarchical-cache",), "--enable-hierarchical-cache"),
        (("--kv-cache-dtype", "fp8_e5m2"), "--kv-cache-dtype"),
        (("--enable-mixed-chunk",), "--enable-mixed-chunk"),
        (("--disaggregation-mode", "prefill"), "--disaggregation-mode"),
        (("--decode-attention-backend", "triton"), "--decode-attention-backend"),
        (("--attention-backend", "triton"), "--attention-backend"),
        (("--page-size", "16"), "--page-size"),
    ],
)
def test_flags_that_pages_do_not_support_are_refused(refused, arguments, words):
    assert words in refused(InputError, *arguments)


def test_ranks_that_cannot_share_the_heads_are_refused(refused):
    three = Machine("0.5.15.post1", (H200,) * 3)
    assert "--tp-size 1 or 2 or 4" in refused(InputError, "--tp-size", "3", machine=three)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q_heads": 34, "kv_heads": 2}, "17 query heads a KV head, kernels have 1 to 16"),
        ({"d_k": 40}, "kernels have multiples of 16 up to 256"),
        ({"d_v": 272}, "kernels have multiples of 16 up to 256"),
    ],
)
def test_heads_without_a_kernel_are_refused(tiny, change, words):
    assert early.MAX_HEAD_DIM == arrays.MAX_HEAD_DIM
    geometry = open_bundle(tiny.folder / "nova.kvcq").manifest.geometry
    check_kernels(geometry)
    last = geometry.layers[-1].model_copy(update=change)
    with pytest.raises(UnsupportedError, match=rf"{words} \(layer 3\): .*--engine hf"):
        check_kernels(geometry.model_copy(update={"layers": (*geometry.layers[:-1], last)}))


def test_a_layer_that_kernels_do_not_read_is_refused_before_weights_load(refused, monkeypatch):
    monkeypatch.setattr("kvcq.runtime.hf.kernels._same_words", lambda *_: False)
    line = refused(UnsupportedError)
    assert line.startswith("no kernels: a codebook is not in steps")
    assert line.endswith("(layer 0): serve this bundle with --engine hf")


def test_float16_is_refused(refused):
    assert "bfloat16" in refused(InputError, dtype="float16")


def test_contexts_that_the_model_or_the_proof_do_not_have_are_refused(refused):
    assert "512" in refused(InputError, max_context=1024)
    assert "the canary alone has 205" in refused(InputError, max_context=128)


def test_files_that_are_not_there_are_refused(refused, tmp_path):
    assert "--chat-template" in refused(InputError, chat_template=tmp_path / "no.jinja")
    assert "--trace" in refused(InputError, trace=tmp_path / "no" / "trace.jsonl")


def test_a_port_in_use_is_refused(refused):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "cannot listen" in refused(InputError, port=taken.getsockname()[1])
    assert "cannot listen" in refused(InputError, host="192.0.2.1")


def test_memory_that_holds_nothing_is_refused(refused):
    small = Machine("0.5.15.post1", (Gpu("small", 1 << 20, (9, 0)),))
    assert "running requests take" in refused(ResourceError, machine=small, max_running=64)
    assert "is no share" in refused(InputError, "--mem-fraction-static", "1.5")


def test_a_machine_without_what_it_takes_is_refused_by_name():
    with pytest.raises(UnavailableError, match=r"none found .*--engine hf"):
        check_gpus(Machine("0.5.15", ()), 1)
    with pytest.raises(UnavailableError, match=r"needs 2 CUDA GPUs, only 1 found .*--tp-size"):
        check_gpus(Machine("0.5.15", (H200,)), 2)
    with pytest.raises(MismatchError, match=r"compute capability 7\.5, the kernels need 8\.0"):
        check_gpus(Machine("0.5.15", (Gpu("Tesla T4", 15 << 30, (7, 5)),)), 1)
    check_gpus(MACHINE, 2)


def test_no_driver_is_no_device(monkeypatch):
    monkeypatch.setattr(machines, "DRIVER", "libno_such_driver.so.1")
    assert cuda_devices() == ()


def test_a_plugin_that_sglang_would_not_find_is_told(monkeypatch):
    monkeypatch.setattr(machines, "require", lambda: "0.5.15.post1")
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    with pytest.raises(UnavailableError, match="no installed package offers its plugin"):
        this_machine()


def serve_process(tiny, path, *more):
    """Run the real command; return exit code, error line and seconds of processor."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = python(
        *("-m", "kvcq", "serve", str(tiny.folder / "nova.kvcq"), "--model", str(tiny.model), "--engine", "sglang"),
        *("--quiet", *more),
        PYTHONPATH=os.pathsep.join(map(str, path)),
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.returncode, done.stderr.decode(), used


def no_sglang():
    try:
        metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return True
    return False


@pytest.mark.skipif(not no_sglang(), reason="SGLang is installed here")
def test_without_sglang_the_line_names_the_other_engine(tiny):
    code, line, used = serve_process(tiny, [ROOT])
    assert (code, line.count("\n")) == (7, 1)
    assert "SGLang is not installed" in line
    assert "--engine hf" in line
    assert ">=0.5.13,<0.5.18" in line
    assert used < SECONDS


@pytest.mark.skipif(bool(cuda_devices()), reason="there is a GPU here")
def test_without_a_gpu_the_line_names_the_other_engine(tiny):
    code, line, used = serve_process(tiny, [STUB, ROOT])
    assert (code, line.count("\n")) == (7, 1)
    assert "none found" in line
    assert "--engine hf" in line
    assert used < SECONDS


def test_another_release_of_sglang_is_refused_with_the_window(tiny, tmp_path):
    other: Path = tmp_path / "sglang-0.5.18.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.18\n")
    code, line, used = serve_process(tiny, [tmp_path, ROOT])
    assert code == 5
    assert ">=0.5.13,<0.5.18" in line
    assert "--engine hf" in line
    assert used < SECONDS


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--memory", "1G"), "use --mem-fraction-static"),
        (("--device", "cuda:1"), "use CUDA_VISIBLE_DEVICES"),
        (("--chunk", "64"), "use --chunked-prefill-size"),
        (("--threads", "2"), "leave it out"),
    ],
)
def test_options_of_the_other_engine_are_refused(tiny, more, words):
    code, line, _ = serve_process(tiny, [ROOT], *more)
    assert (code, line.count("\n")) == (2, 1)
    assert words in line


@pytest.mark.parametrize("more", [("--trace", "t"), ("--", "--tp", "2")])
def test_options_of_sglang_are_refused_by_the_embedded_engine(tiny, more):
    done = python("-m", "kvcq", "serve", str(tiny.folder / "nova.kvcq"), "--model", str(tiny.model), *more)
    assert done.returncode == 2
    assert b"--engine hf" in done.stderr


# What is refused, and which libraries were loaded until then.
REFUSE = """
import json, sys
from pathlib import Path
from kvcq.errors import KvcqError
from kvcq.pipeline.serve_sglang import serve_sglang
from kvcq.pipeline.sglang.machine import Gpu, Machine
from kvcq.pipeline.sglang.request import SglangRequest
options = json.loads(sys.argv[1])
options["bundle"], options["arguments"] = Path(options["bundle"]), tuple(options["arguments"])
gpu = Gpu("NVIDIA H200", options.pop("memory"), (9, 0))
try:
    serve_sglang(SglangRequest(port=0, **options), machine=Machine("0.5.15.post1", (gpu,) * 3))
except KvcqError as error:
    print(error)
print([name for name in ("torch", "transformers", "huggingface_hub", "triton", "httpx2") if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arguments": ["--enable-mixed-chunk"]}, "--enable-mixed-chunk"),
        ({"arguments": ["--kv-cache-dtype", "fp8_e5m2"]}, "--kv-cache-dtype"),
        ({"arguments": ["--tp-size", "3"]}, "--tp-size 3"),
        ({"arguments": ["--json-model-override-args", '{"num_hidden_layers": 2}']}, "another model"),
        ({"arguments": ["--mem-fraction-static", "2"]}, "no share"),
        ({"dtype": "float16"}, "bfloat16"),
        ({"dtype": "auto"}, "this checkpoint runs in float16"),
        ({"arguments": ["--json-model-override-args", '{"architectures": null}']}, "names no architecture"),
        ({"arguments": ["--json-model-override-args", '{"kv_lora_rank": 8}']}, "latents"),
        ({"max_running": 5000}, "--max-running-requests 5000"),
        ({"max_context": 100}, "the canary alone has"),
        ({"max_context": 100_000}, "the model's context is 512 tokens"),
        ({"memory": 1 << 20, "max_running": 64}, "64 running requests take"),
        ({"model": "/no/such/model"}, "no such model"),
    ],
)
def test_what_needs_no_library_is_refused_before_one_is_loaded(tiny, change, words):
    plain = {"bundle": str(tiny.folder / "nova.kvcq"), "model": str(tiny.model), "dtype": "bfloat16"}
    plain |= {"arguments": [], "memory": 140 << 30}
    told, loaded = python("-c", REFUSE, json.dumps(plain | change)).stdout.decode().splitlines()
    assert words in told
    assert loaded == "[]"
