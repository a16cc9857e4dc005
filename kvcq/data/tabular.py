"""Rows of parquet files and hub data sets (the extra ``data``), streamed with the place they came from."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvcq.errors import InputError, UnavailableError

_HUB = re.compile(r"hf:(?P<name>[\w.-]+(/[\w.-]+)?)(@(?P<config>[\w.-]+))?(:(?P<split>[\w.+-]+))?")
_INSTALL = "pip install 'kvcq[data]'"


def _missing(library: str) -> bool:
    if library in sys.modules:
        return sys.modules[library] is None
    return find_spec(library) is None


def check_parquet(path: Path) -> None:
    """Refuse a parquet file where pyarrow is missing, before a model is loaded.

    Raises:
        UnavailableError: pyarrow is not installed.
    """
    if _missing("pyarrow"):
        raise UnavailableError("reading parquet needs pyarrow", where=path, fix=_INSTALL)


def check_hub(source: str) -> re.Match[str]:
    """Return the parts of a hub data set's name, before a model is loaded and the hub is asked.

    Raises:
        UnavailableError: datasets is not installed.
        InputError: a malformed name.
    """
    match = _HUB.fullmatch(source)
    if match is None:
        raise InputError("not a data set name", where=source, fix="write hf:NAME[@CONFIG][:SPLIT]")
    if _missing("datasets"):
        raise UnavailableError("hub data sets need the datasets library", where=source, fix=_INSTALL)
    return match


def parquet_rows(path: Path, text_column: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) of a parquet file, reading only the columns that can hold text.

    Raises:
        UnavailableError: pyarrow is not installed.
        InputError: not a parquet file, or a damaged one.
    """
    check_parquet(path)
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = [name for name in ([text_column] if text_column else ["messages", "text"]) if name in names]
            if not wanted:
                what = f"no field {text_column or 'text'!r}"
                raise InputError(what, where=path, fix=f"pass --text-column; fields: {', '.join(names)}")
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except pa.ArrowInvalid as error:
        what = f"not a readable parquet file, {str(error).splitlines()[0]}"
        raise InputError(what, where=path, fix="write it again") from None


def hub_rows(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) of a hub data set, streamed: nothing is downloaded that is not used.

    Args:
        source: ``hf:NAME[@CONFIG][:SPLIT]``, split ``train`` unless named.

    Raises:
        UnavailableError: datasets is not installed, or the hub cannot be reached.
        InputError: a malformed name, or no such data set, configuration or split.
    """
    match = check_hub(source)
    import datasets

    split = match["split"] or "train"
    try:
        rows = datasets.load_dataset(match["name"], match["config"], split=split, streaming=True)
        for number, row in enumerate(rows, start=1):
            yield f"{source}, row {number}", row
    except datasets.exceptions.DatasetNotFoundError as error:
        raise UnavailableError(_first_line(error), where=source, fix="check the name and your hub login") from error
    except ValueError as error:
        raise InputError(_first_line(error), where=source, fix="write hf:NAME[@CONFIG][:SPLIT]") from error
    except (OSError, RuntimeError) as error:
        fix = "go online, or name local files"
        raise UnavailableError(f"cannot be reached, {_first_line(error)}", where=source, fix=fix) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
