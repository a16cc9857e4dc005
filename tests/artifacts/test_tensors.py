import json
import string

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcq.artifacts.store import Staging
from kvcq.artifacts.tensor_file import parse_tensors, read_tensors
from kvcq.artifacts.tensors import tensor_chunks, tensor_entry, tensor_index, tensors_digest, write_tensors
from kvcq.errors import CorruptArtifactError, InputError
from kvcq.spec import canonical

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.float16, torch.bfloat16, torch.int32,
    torch.uint32, torch.float32, torch.float64, torch.int64, torch.uint64,
]  # fmt: skip
names = st.text(string.ascii_letters + string.digits + "_", min_size=1, max_size=6)


@st.composite
def tensor(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    data = torch.tensor(draw(st.lists(st.integers(0, 1), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))))
    return data.to(dtype).reshape(shape)


def encoded(tensors):
    return b"".join(tensor_chunks(tensors))


@given(st.dictionaries(names, tensor(), min_size=1, max_size=6))
@settings(max_examples=80, deadline=None)
def test_bytes_equal_those_of_the_library(tensors):
    data = encoded(tensors)
    assert data == safetensors.torch.save(tensors)
    file = parse_tensors(memoryview(bytearray(data)), "x")
    for name, value in tensors.items():
        assert file.as_torch(name).dtype == value.dtype
        assert torch.equal(file.as_torch(name), value)
        assert np.array_equal(file.as_numpy(name), value.float().numpy() if value.dtype == torch.bfloat16 else value)
    assert file.digest() == tensors_digest(tensor_index(tensors), tensors)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_flipped_header_byte_is_refused_or_names_other_tensors(data):
    """No header but the canonical one is read: what is accepted is what the library writes for it."""
    raw = bytearray(encoded({"a": torch.ones(3), "b": torch.zeros(2, 2, dtype=torch.int8)}))
    size = 8 + int.from_bytes(raw[:8], "little")
    raw[data.draw(st.integers(0, size - 1))] ^= data.draw(st.integers(1, 255))
    try:
        file = parse_tensors(memoryview(raw), "x")
    except CorruptArtifactError:
        return
    assert safetensors.torch.save(file.torch_tensors()) == bytes(raw)


@given(st.binary(max_size=200))
def test_random_bytes_end_in_one_error(data):
    with pytest.raises(CorruptArtifactError):
        parse_tensors(memoryview(bytearray(data)), "x")


def test_views_shared_storage_and_byte_order_are_written_by_value(tmp_path):
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensors = {"t": base.T, "row": base[1], "big": np.arange(4, dtype=">f8")}
    with Staging(tmp_path / "out") as stage:
        entry = write_tensors(stage, "tensors.safetensors", tensors)
    back = read_tensors(tmp_path / "out" / entry.name, framework="pt")
    assert torch.equal(back["t"], base.T) and torch.equal(back["row"], base[1])
    assert np.array_equal(read_tensors(tmp_path / "out" / entry.name)["big"], np.arange(4))


def test_digest_is_index_then_data_by_name():
    import hashlib

    tensors = {"layers.10.k.offset": np.ones(2, np.float32), "b": np.zeros(3, np.int8)}
    index = tensor_index(tensors)
    assert [(entry.name, entry.role) for entry in index] == [("b", "b"), ("layers.10.k.offset", "k.offset")]
    data = canonical.dumps([entry.plain() for entry in index]) + bytes(3) + np.ones(2, np.float32).tobytes()
    assert tensors_digest(index, tensors) == hashlib.sha256(data).hexdigest()


def test_foreign_dtypes_and_names_are_refused():
    with pytest.raises(InputError, match="complex64"):
        tensor_entry("a", np.zeros(2, np.complex64))
    for name in ("", "a/b", "../a", "a..b", "é", "a b"):
        with pytest.raises(InputError, match="tensor name"):
            tensor_entry(name, np.zeros(2))


def header_file(text, data=b""):
    text += b" " * (-len(text) % 8)
    return memoryview(bytearray(len(text).to_bytes(8, "little") + text + data))


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
        b'{"__metadata__":{"x":"y"},"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"I8","shape":[1],"data_offsets":[1,2]}}',
        b'{"a": {"dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"F8_E5M2","shape":[1],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"I8","shape":[true],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"I8","shape":[-1],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"I8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}}',
        b'{"../a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"I8","shape":1,"data_offsets":[0,1]}}',
        b'{"a":3}',
        b"[1]",
        b"{" * 50000,
        b"[" * 50000,
    ],
)
def test_headers_that_are_not_canonical_are_refused(text):
    with pytest.raises(CorruptArtifactError, match="header"):
        parse_tensors(header_file(text, b"\0"), "x")


def test_a_claimed_shape_never_allocates():
    text = json.dumps({"a": {"dtype": "F64", "shape": [2**40], "data_offsets": [0, 2**43]}}, separators=(",", ":"))
    with pytest.raises(CorruptArtifactError, match="truncated"):
        parse_tensors(header_file(text.encode(), b"\0" * 8), "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d[:20], "truncated"),
        (lambda d: d[:-8], "truncated"),
        (lambda d: b"", "truncated"),
        (lambda d: d + b"ab", "trailing bytes"),
        (lambda d: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    ],
)
def test_a_broken_file_is_one_line_that_names_it(tmp_path, change, message):
    path = tmp_path / "a.safetensors"
    path.write_bytes(change(encoded({"a": np.arange(9.0)})))
    with pytest.raises(CorruptArtifactError, match=message) as caught:
        read_tensors(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
