import io
import json
import sys
from types import SimpleNamespace

import pytest

from kvcq.data import Document, describe_sources, iter_documents
from kvcq.errors import InputError, UnavailableError


def read(*sources, **options):
    return list(iter_documents([str(source) for source in sources], **options))


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n", encoding="utf-8")
    (tmp_path / "b.md").write_bytes("\ufeff# Title\r\nline".encode())
    assert read(tmp_path / "a.txt", tmp_path / "b.md") == [Document(text="one\ntwo\n"), Document(text="# Title\nline")]


def test_jsonl_rows_hold_text_or_messages(tmp_path):
    turns = [{"role": "user", "content": "hi"}]
    rows = [{"text": "a"}, {"messages": turns}, {"text": "  "}, {"messages": None, "text": "b"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert read(path) == [Document(text="a"), Document(messages=turns), Document(text="b")]


def test_text_column_names_the_field(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"body": "a", "text": "b"}\n{"body": [{"role": "user", "content": "c"}]}\n')
    first, second = read(path, text_column="body")
    assert first.text == "a" and second.messages == [{"role": "user", "content": "c"}]


def test_reading_is_lazy(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\nnot json\n')
    assert next(iter_documents([str(path)])) == Document(text="a")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{oops", "not JSON"),
        ("[1]", "not an object"),
        ('{"txt": "a"}', "no field 'text'"),
        ('{"text": 5}', "is int, not text"),
        ('{"messages": []}', "not a list of turns"),
        ('{"messages": ["hi"]}', "not a list of turns"),
        ('{"messages": "hi", "x": "' + "y" * 9 + '"', "not JSON"),
        ('{"text": "\\ud800"}', "surrogate"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, line, what):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(InputError, match=what) as caught:
        read(path)
    assert f"{path}:2" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("empty.txt", b"", "no text in it"),
        ("blank.jsonl", b"\n \n", "no text in it"),
        ("binary.txt", b"ab\0cd", "binary"),
        ("latin.txt", "café".encode("latin-1"), "not UTF-8 at byte 3"),
        ("latin.jsonl", b'{"text": "\xff"}', "not UTF-8"),
        ("table.csv", b"a,b", "unknown format .csv"),
        ("plain", b"a", "unknown format without suffix"),
        ("bad.parquet", b"PAR1 nonsense", "not a readable parquet file"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, name, content, what):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=what) as caught:
        read(tmp_path / name)
    assert name in str(caught.value)


def test_folders_missing_files_and_unknown_names_are_refused(tmp_path):
    for source, what in [(tmp_path, "a folder"), (tmp_path / "no.txt", "no such file"), ("builtin:nope", "unknown")]:
        with pytest.raises(InputError, match=what):
            read(source)
    with pytest.raises(InputError, match="no calibration text"):
        read()
    with pytest.raises(InputError, match="only once"):
        read("-", "-")


def test_stdin_is_one_document(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("über".encode())))
    assert read("-") == [Document(text="über")]


def test_parquet_rows_stream_in_order(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": [f"row {i}" for i in range(600)], "other": list(range(600))}), path)
    assert [document.text for document in read(path)] == [f"row {i}" for i in range(600)]
    with pytest.raises(InputError, match="fields: text, other"):
        read(path, text_column="body")
    with pytest.raises(InputError, match="is int, not text") as caught:
        read(path, text_column="other")
    assert "rows.parquet, row 1" in str(caught.value)


def test_missing_extras_are_named(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in (tmp_path / "a.parquet", "hf:org/name"):
        with pytest.raises(UnavailableError, match=r"kvcq\[data\]"):
            read(source)


def fake_hub(load_dataset):
    missing = type("DatasetNotFoundError", (FileNotFoundError,), {})
    return SimpleNamespace(load_dataset=load_dataset, exceptions=SimpleNamespace(DatasetNotFoundError=missing))


def test_hub_names_carry_configuration_and_split(monkeypatch):
    seen = []

    def load(name, config, *, split, streaming):
        seen.append((name, config, split, streaming))
        return iter([{"text": "a"}])

    monkeypatch.setitem(sys.modules, "datasets", fake_hub(load))
    assert read("hf:org/name@raw-v1:validation", "hf:name") == [Document(text="a")] * 2
    assert seen == [("org/name", "raw-v1", "validation", True), ("name", None, "train", True)]
    for bad in ("hf:", "hf:a/b/c", "hf:../x y"):
        with pytest.raises(InputError, match="not a data set name"):
            read(bad)


@pytest.mark.parametrize(
    ("error", "expected"), [(ConnectionError("down"), UnavailableError), (ValueError("Unknown split"), InputError)]
)
def test_hub_failures_become_one_line(monkeypatch, error, expected):
    def load(*_, **__):
        raise error

    monkeypatch.setitem(sys.modules, "datasets", fake_hub(load))
    with pytest.raises(expected, match=str(error)):
        read("hf:org/name")
    hub = fake_hub(None)
    hub.load_dataset = lambda *_, **__: (_ for _ in ()).throw(hub.exceptions.DatasetNotFoundError("gone\nx"))
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(UnavailableError, match="gone"):
        read("hf:org/name")


def test_labels_carry_no_machine_path(tmp_path):
    labels = describe_sources([str(tmp_path / "deep" / "x.txt"), "-", "hf:a/b:test", "builtin:stdlib"])
    assert labels == ("x.txt", "stdin", "hf:a/b:test", "builtin:stdlib")


def test_builtin_texts_are_long_and_deterministic():
    topics, code = read("builtin:pydoc-topics"), read("builtin:stdlib")
    assert sum(len(document.text) for document in topics) > 300_000
    assert sum(len(document.text) for document in code) > 1_000_000
    assert topics == read("builtin:pydoc-topics") and code == read("builtin:stdlib")
    assert any("class ArgumentParser" in document.text for document in code)


def test_builtin_texts_missing_from_this_python(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    monkeypatch.setattr("kvcq.data.builtin.sysconfig.get_path", lambda _: str(tmp_path))
    for source in ("builtin:pydoc-topics", "builtin:stdlib"):
        with pytest.raises(UnavailableError):
            read(source)
