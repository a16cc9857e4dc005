"""Calibration sources to documents, read lazily.

A source is a ``.txt`` or ``.md`` file (one document), a ``.jsonl`` or ``.parquet`` file (one document a row),
``hf:NAME[@CONFIG][:SPLIT]`` (a dataset of the hub, streamed), ``-`` (text on stdin), or a built-in text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcq.data.builtin import BUILTIN
from kvcq.data.tabular import check_hub, check_parquet, hub_rows, parquet_rows
from kvcq.errors import InputError

PLAIN = frozenset({".txt", ".md"})
FORMATS = ".txt, .md, .jsonl, .parquet, hf:NAME[@CONFIG][:SPLIT], - (stdin), " + ", ".join(sorted(BUILTIN))


@dataclass(frozen=True)
class Document:
    """One text or one conversation: exactly one of the two is set."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None


def iter_documents(sources: Sequence[str], *, text_column: str | None = None) -> Iterator[Document]:
    """Yield the documents of all sources in order, reading no further than asked.

    Args:
        sources: Paths, ``-``, ``hf:`` or ``builtin:`` names.
        text_column: Field of table rows that holds the text; default: ``messages`` if present, else ``text``.

    Raises:
        InputError: a missing, empty, binary or non-UTF-8 file, a folder, an unknown format, or a bad row.
        UnavailableError: a missing extra, or a hub data set out of reach.
    """
    check_sources(sources)
    for source in sources:
        empty = True
        for document in _documents(source, text_column):
            empty = False
            yield document
        if empty:
            raise InputError("no text in it", where=source, fix="remove the source or fill it")


def check_sources(sources: Sequence[str]) -> None:
    """Refuse sources that cannot exist, before a model is loaded: reading is lazy and may never come to the last one.

    Raises:
        InputError: no source, stdin twice, an unknown built-in text, a folder, a missing file, an unknown format.
        UnavailableError: the library that reads a source is not installed.
    """
    if not sources:
        raise InputError("no calibration text", where="--data", fix="name at least one source: " + FORMATS)
    if list(sources).count("-") > 1:
        raise InputError("stdin can be read only once", where="--data", fix="name - once")
    for source in sources:
        if source.startswith("builtin:"):
            if source not in BUILTIN:
                raise InputError("unknown built-in text", where=source, fix="use one of " + ", ".join(sorted(BUILTIN)))
        elif source.startswith("hf:"):
            check_hub(source)
        elif source != "-":
            _check_file(source)
            if source.lower().endswith(".parquet"):
                check_parquet(Path(source))


def describe_sources(sources: Sequence[str]) -> tuple[str, ...]:
    """Label sources for an artifact: file names without their folders, so that no machine path is recorded."""
    return tuple(
        "stdin" if source == "-" else source if source.startswith(("hf:", "builtin:")) else Path(source).name
        for source in sources
    )


def _documents(source: str, text_column: str | None) -> Iterator[Document]:
    if source.startswith("builtin:"):
        yield from (Document(text=text) for text in BUILTIN[source]())
    elif source.startswith("hf:"):
        yield from _rows(hub_rows(source), text_column)
    elif source == "-":
        yield from _plain(sys.stdin.buffer.read(), "stdin")
    else:
        yield from _file(source, text_column)


def _file(source: str, text_column: str | None) -> Iterator[Document]:
    path = Path(source)
    try:
        yield from _READERS[path.suffix.lower()](path, text_column)
    except OSError as error:
        raise InputError(f"cannot be read, {error.strerror or error}", where=source, fix="check the file") from error


def _check_file(source: str) -> None:
    path = Path(source)
    if path.is_dir():
        raise InputError("a folder is not a text", where=source, fix="name the files in it")
    if not path.is_file():
        raise InputError("no such file", where=source, fix="sources are " + FORMATS)
    if path.suffix.lower() not in _READERS:
        raise InputError(f"unknown format {path.suffix or 'without suffix'}", where=source, fix="use " + FORMATS)


def _plain_file(path: Path, _: str | None) -> Iterator[Document]:
    yield from _plain(path.read_bytes(), str(path))


def _plain(data: bytes, where: str) -> Iterator[Document]:
    text = _decode(data, where)
    if text.strip():
        yield Document(text=text.replace("\r\n", "\n"))


def _decode(data: bytes, where: str) -> str:
    if b"\0" in data:
        raise InputError("a binary file, not text", where=where, fix="give UTF-8 text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 at byte {error.start}", where=where, fix="convert it to UTF-8") from None


def _jsonl_file(path: Path, text_column: str | None) -> Iterator[Document]:
    yield from _rows(_jsonl_rows(path), text_column)


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                row = json.loads(_decode(line, where))
                json.dumps(row, ensure_ascii=False).encode()  # tokenizers panic on half of a surrogate pair
                yield where, row
            except UnicodeEncodeError:
                raise InputError("half of a surrogate pair", where=where, fix="repair the escapes") from None
            except json.JSONDecodeError as error:
                what = f"not JSON, {error.msg} at column {error.colno}"
                raise InputError(what, where=where, fix="one JSON object a line") from None
            except RecursionError:
                raise InputError("JSON nested too deeply", where=where, fix="one flat object a line") from None


def _parquet_file(path: Path, text_column: str | None) -> Iterator[Document]:
    yield from _rows(parquet_rows(path, text_column), text_column)


_READERS: dict[str, Callable[[Path, str | None], Iterator[Document]]] = {
    **dict.fromkeys(PLAIN, _plain_file),
    ".jsonl": _jsonl_file,
    ".parquet": _parquet_file,
}


def _rows(rows: Iterator[tuple[str, Any]], text_column: str | None) -> Iterator[Document]:
    """Turn located rows into documents; rows of blank text are skipped."""
    for where, row in rows:
        if not isinstance(row, Mapping):
            raise InputError("a row is not an object", where=where, fix='write {"text": ...} or {"messages": [...]}')
        column = text_column or ("messages" if row.get("messages") is not None else "text")
        if column not in row:
            keys = ", ".join(sorted(map(str, row))) or "none"
            raise InputError(f"no field {column!r}", where=where, fix=f"pass --text-column; fields: {keys}")
        value = row[column]
        if isinstance(value, str):
            if value.strip():
                yield Document(text=value)
        elif column == "messages" or isinstance(value, list):
            yield Document(messages=_messages(value, where))
        else:
            what = f"field {column!r} is {type(value).__name__}, not text"
            raise InputError(what, where=where, fix="name a text field with --text-column")


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    good = isinstance(value, list) and value and all(isinstance(turn, Mapping) and "role" in turn for turn in value)
    if not good:
        raise InputError("messages are not a list of turns", where=where, fix='write [{"role": ..., "content": ...}]')
    return [dict(turn) for turn in value]
