from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcq.errors import InputError
from kvcq.evaluation.questions import load_questions


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


GOOD = {"prompt": "1+1?", "answers": [2], "metric": "exact"}


def test_rows_are_read_in_order_with_their_names(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", GOOD, "", GOOD | {"id": "x", "meta": {"level": 3}})
    second = write(tmp_path / "b.jsonl", {"messages": [{"role": "user", "content": "?"}], "answers": ["B"],
                                          "metric": "choice", "choices": ["u", "v"]})  # fmt: skip
    found = load_questions([first, second])
    assert [(q.task, q.id) for q in found] == [("a", "1"), ("a", "x"), ("b", "1")]
    assert found[0].row.answers == ("2",) and found[2].row.choices == ("u", "v")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("{", "not JSON"), ("[1]", "not a JSON object"), (GOOD | {"metric": "bleu"}, "metric"),
        (GOOD | {"answer": "2"}, "unknown field 'answer'"), ({"prompt": "?", "metric": "exact"}, "needs answers"),
        (GOOD | {"answers": [" "]}, "needs answers"), ({"answers": ["1"], "metric": "exact"}, "exactly one of prompt"),
        (GOOD | {"messages": []}, "exactly one of prompt"), (GOOD | {"tests": "x"}, "for metric code"),
        ({"messages": [{"role": "assistant", "content": ""}], "answers": ["1"], "metric": "exact"}, "end with"),
        ({"prompt": "?", "metric": "code"}, "needs tests"), (GOOD | {"choices": ["x"]}, "for metric choice"),
        (GOOD | {"metric": "choice", "choices": ["x", "y"], "answers": ["C"]}, "A to B"),
        (GOOD | {"answers": "2"}, "answers"), (GOOD | {"prompt": 3}, "prompt"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_with_its_line(tmp_path: Path, row: Any, told: str) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, row)
    with pytest.raises(InputError) as error:
        load_questions([path])
    assert told in str(error.value) and f"{path}:2" in str(error.value)


def test_files_and_ids_are_told_apart(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD | {"id": 2}, GOOD)
    with pytest.raises(InputError, match="second item with id '2'"):
        load_questions([path])
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match="two task files are called a"):
        load_questions([write(path, GOOD), write(tmp_path / "other" / "a.jsonl", GOOD)])
    for broken in (b"", b"\xff\xfe"):
        path.write_bytes(broken)
        with pytest.raises(InputError):
            load_questions([path])
    with pytest.raises(InputError, match="cannot read"):
        load_questions([tmp_path / "none.jsonl"])
