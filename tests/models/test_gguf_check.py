import random
import resource
import shutil
import struct
import time
import tracemalloc

import pytest

from kvcq.errors import InputError, KvcqError, ResourceError
from kvcq.models import gguf, gguf_check
from kvcq.models.gguf import convert_gguf
from kvcq.models.gguf_check import read_header
from tests.models.gguf_files import (
    ARCHITECTURE,
    ARRAY,
    BOOL,
    EMBEDDING,
    F32,
    FLOAT16,
    FLOAT32,
    I32,
    Q8_0,
    STRING,
    U8,
    U32,
    array,
    entry,
    header,
    tensor,
    text,
    write_small,
)

HUGE = 2**64 - 1
LLAMA = (
    ARCHITECTURE,
    entry("llama.block_count", U32, struct.pack("<I", 1)),
    entry("llama.embedding_length", U32, struct.pack("<I", 8)),
)
TWO = (EMBEDDING, tensor("blk.0.attn_q.weight", (8,), FLOAT16, 128))


def plausible(*entries, tensors=TWO, data=256):
    return header(*LLAMA, *entries, *tensors, tensors=len(tensors), entries=3 + len(entries), data=data)


def read(tmp_path, raw):
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    return read_header(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_small(tmp_path_factory.mktemp("gguf") / "small.gguf")


def test_a_header_is_read_as_written(tmp_path):
    words = entry("tokenizer.ggml.tokens", ARRAY, array(STRING, 2, text("a") + text("bc")))
    flag = entry("tokenizer.ggml.add_bos_token", BOOL, b"\1")
    theta = entry("llama.rope.freq_base", F32, struct.pack("<f", 0.5))
    found = read(tmp_path, plausible(words, flag, theta))
    assert found.values["llama.rope.freq_base"] == 0.5 and found.values["tokenizer.ggml.add_bos_token"] is True
    assert found.lengths == {"tokenizer.ggml.tokens": 2}
    assert found.shapes == {"token_embd.weight": (8, 4), "blk.0.attn_q.weight": (8,)}
    assert (found.numbers, found.decoded_bytes) == (40, 80)


def test_the_writers_file_passes_and_converts(small, tmp_path):
    found = read_header(small)
    assert found.lengths["tokenizer.ggml.tokens"] == found.shapes["token_embd.weight"][-1] == 128
    assert (convert_gguf(small, tmp_path / "out") / "model.safetensors").stat().st_size > found.decoded_bytes


BAD_INPUT = {
    "not a GGUF file": header(magic=b"GGML"),
    "version 4": header(ARCHITECTURE, EMBEDDING, version=4),
    "version 1": header(ARCHITECTURE, EMBEDDING, version=1),
    "version 0": header(ARCHITECTURE, EMBEDDING, version=0),
    "big-endian": header(version=3 << 24),
    "ends after 6 bytes": b"GGUF\3\0",
    "no room for 18446744073709551615 tensors": header(tensors=HUGE),
    "no room for 1000 metadata entries": header(tensors=0, entries=1000),
    "a metadata key of 18446744073709551615 bytes": header(struct.pack("<Q", HUGE)),
    "not UTF-8": header(entry(b"\xff", U8, b"\0"), EMBEDDING),
    "'a' is given twice": header(entry("a", U8, b"\0"), entry("a", U8, b"\0"), EMBEDDING, entries=2),
    "unknown type 13": header(entry("a", 13, b"\0"), EMBEDDING),
    "unknown type 99": header(entry("a", ARRAY, array(99, 1)), EMBEDDING),
    "array of arrays": header(entry("a", ARRAY, array(ARRAY, 1, array(U8, 1, b"\0"))), EMBEDDING),
    "no room for 4611686018427387904 elements": header(entry("a", ARRAY, array(U8, 2**62)), EMBEDDING),
    "no room for 1000 elements": header(entry("a", ARRAY, array(STRING, 1000, text("b"))), EMBEDDING),
    "0 dimensions": header(ARCHITECTURE, tensor("t", ())),
    "4294967295 dimensions": header(ARCHITECTURE, text("t") + struct.pack("<I", 2**32 - 1)),
    "'t' has the shape": header(ARCHITECTURE, tensor("t", (0, 4))),
    "in blocks of 32": header(ARCHITECTURE, tensor("t", (33,), Q8_0)),
    "'t' has the unknown type 77": header(ARCHITECTURE, tensor("t", (1,), 77)),
    "a tensor is given twice": header(ARCHITECTURE, EMBEDDING, EMBEDDING, tensors=2),
    "lies outside": header(ARCHITECTURE, EMBEDDING, data=64),
    "'u' lies outside": header(ARCHITECTURE, tensor("u", (4,), FLOAT32, 8)),
    "'t' lies outside": header(ARCHITECTURE, tensor("t", (2**40, 2**40))),
    "'v' lies outside": header(ARCHITECTURE, tensor("v", (4,), FLOAT32, 2**63)),
    "overlap": plausible(tensors=(EMBEDDING, tensor("b", (8,), FLOAT32, 96))),
    "the alignment 24": plausible(entry("general.alignment", U32, struct.pack("<I", 24))),
    "the alignment 0": plausible(entry("general.alignment", U32, bytes(4))),
    "the alignment 'x'": plausible(entry("general.alignment", STRING, text("x"))),
    "no architecture or no tensors": header(entry("a", U8, b"\0"), EMBEDDING),
    "no architecture": header(entry("general.architecture", U8, b"\0"), tensors=0),
    "no 'llama.block_count'": header(ARCHITECTURE, EMBEDDING),
    "'llama.expert_count' is 4000000000": plausible(entry("llama.expert_count", U32, struct.pack("<I", 4 * 10**9))),
    "'llama.x_count' is -1": plausible(entry("llama.x_count", I32, struct.pack("<i", -1))),
    "'llama.block_count' is 1": plausible(tensors=TWO[:1]),
    "3 tokens, but embeddings of 1": plausible(
        entry("tokenizer.ggml.tokens", ARRAY, array(STRING, 3, 3 * text("a"))),
        tensors=(tensor("token_embd.weight", (8, 1)), TWO[1]),
    ),
}


@pytest.mark.parametrize("raw", BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_a_header_that_contradicts_itself_is_one_line_of_bad_input(tmp_path, raw, request):
    with pytest.raises(InputError) as refusal:
        read(tmp_path, raw)
    assert request.node.callspec.id in str(refusal.value) and "x.gguf" in str(refusal.value)
    assert "\n" not in str(refusal.value) and refusal.value.exit_code == 2


TOO_MUCH = {
    "more than 16 times": plausible(tensors=[tensor(f"t{i}", (4096,), FLOAT16) for i in range(20)], data=8192),
    "has 300 bytes, more than 256": header(entry("k" * 300, U8, b"\0"), EMBEDDING, data=512),
    "has 5000 bytes, more than 4096": plausible(entry("a", ARRAY, array(STRING, 1, text("w" * 5000)))),
    "has 1048577 bytes, more than 1048576": plausible(entry("a", STRING, text("w" * (2**20 + 1)))),
    "131073 tensors, more than 131072": header(tensors=2**17 + 1, data=2**22),
    "4194305 elements of 'a', more than": plausible(entry("a", ARRAY, array(U8, 2**22 + 1)), data=2**23),
    "more than 4194304 metadata elements": plausible(
        entry("a", ARRAY, array(U8, 2**21 + 1, bytes(2**21 + 1))), entry("b", ARRAY, array(U8, 2**21)), data=2**23
    ),
}


@pytest.mark.parametrize("raw", TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_what_is_beyond_a_cap_is_a_matter_of_resources(tmp_path, raw, request):
    with pytest.raises(ResourceError) as refusal:
        read(tmp_path, raw)
    assert request.node.callspec.id in str(refusal.value) and refusal.value.exit_code == 6


def test_a_kilobyte_neither_allocates_nor_hangs(tmp_path):
    claims = [*BAD_INPUT.values(), *(raw for raw in TOO_MUCH.values() if len(raw) < 2048)]
    paths = [tmp_path / f"{i}.gguf" for i in range(len(claims))]
    for path, raw in zip(paths, claims, strict=True):
        path.write_bytes(raw)
    tracemalloc.start()
    started = time.monotonic()
    for path in paths:
        with pytest.raises(KvcqError):
            read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20 and time.monotonic() - started < 5


def test_every_truncation_of_the_header_is_refused(small, tmp_path):
    raw = small.read_bytes()
    end = raw.rindex(b"output.weight")
    for length in [*range(64), *range(64, end, 41), len(raw) - 1]:
        with pytest.raises(InputError):
            read(tmp_path, raw[:length])


def edited(raw, edge, rng):
    """Up to four edits: a byte, a bit, eight bytes that read as a count, a few bytes cut out."""
    raw = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(edge)
        match rng.randrange(4):
            case 0:
                raw[at] = rng.randrange(256)
            case 1:
                raw[at] ^= 1 << rng.randrange(8)
            case 2:
                raw[at : at + 8] = rng.choice((0, 1, 2**31, 2**40, 2**63, HUGE)).to_bytes(8, "little")
            case 3:
                del raw[at : at + rng.randrange(1, 9)]
    return bytes(raw)


def test_mutations_convert_or_end_in_one_line(small, tmp_path):
    raw, rng = small.read_bytes(), random.Random(20)
    edge, path = raw.rindex(b"output.weight") + 64, tmp_path / "m.gguf"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ends = {"refused": 0, "failed": 0, "converted": 0}
    for _ in range(2000):
        path.write_bytes(edited(raw, edge, rng))
        try:
            read_header(path)
        except KvcqError as error:
            assert "\n" not in str(error)
            ends["refused"] += 1
            continue
        if ends["failed"] + ends["converted"] >= 120:
            continue
        started = time.monotonic()
        try:
            convert_gguf(path, tmp_path / "out")
            ends["converted"] += 1
        except KvcqError as error:
            assert "\n" not in str(error)
            ends["failed"] += 1
        assert time.monotonic() - started < 5
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert min(ends.values()) > 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 * 1024
    assert [item.name for item in tmp_path.iterdir()] == ["m.gguf"]


def test_metadata_of_a_giant_are_held_against_the_tensors(small, tmp_path):
    raw = small.read_bytes()
    key = b"llama.feed_forward_length" + struct.pack("<I", U32)
    at = raw.index(key) + len(key)
    (tmp_path / "giant.gguf").write_bytes(raw[:at] + struct.pack("<I", 2**31 - 1) + raw[at + 4 :])
    with pytest.raises(InputError, match="describe a model of 1030"):
        convert_gguf(tmp_path / "giant.gguf", tmp_path / "out")
    assert [item.name for item in tmp_path.iterdir()] == ["giant.gguf"]


def test_a_full_disk_is_told_before_anything_is_written(small, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 100, 0))
    with pytest.raises(ResourceError, match=r"takes 11360 bytes, 0 are free.*free some disk space"):
        convert_gguf(small, tmp_path / "deep" / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (MemoryError(), ResourceError, "out of memory"),
        (OSError(28, "No space left on device"), ResourceError, "No space left"),
        (OSError("no tokenizer"), InputError, "no tokenizer"),
        (gguf.SafetensorError("I/O error"), ResourceError, "I/O error"),
        (KeyError("tokens"), InputError, "it has no 'tokens'"),
    ],
)
def test_failures_of_a_conversion_have_their_exit_codes(small, tmp_path, monkeypatch, error, kind, said):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr(gguf, "save_file", broken)
    with pytest.raises(kind, match=said) as refusal:
        convert_gguf(small, tmp_path / "out")
    assert type(refusal.value) is kind and list(tmp_path.iterdir()) == []


def test_an_unreadable_file_is_one_line(tmp_path):
    with pytest.raises(InputError, match=r"cannot read.*\(gone.gguf\)"):
        read_header(tmp_path / "gone.gguf")


def test_caps_leave_room_for_the_largest_real_files():
    assert gguf_check.MAX_ELEMENTS > 2 * (262_144 + 580_604)
    assert gguf_check.MAX_GROWTH * 18 > 256
