"""A trace names all that an answer depends on: a request's own boundaries, and those of what it reuses."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from kvcq.errors import ResourceError
from kvcq.runtime.sglang.trace import Record, Trace, read_trace
from kvcq.spec.boundary import Boundary


def carried(*positions):
    return tuple(Boundary(position, "carried") for position in positions)


@pytest.fixture
def out():
    return io.StringIO()


def test_chunks_are_carried_and_a_prompt_in_one_forward_has_no_boundary(out):
    trace = Trace(out)
    trace.extend(["a", "b"], [0, 0], [100, 30], [[1, 2, 0], [3, 0, 0]])
    trace.extend(["a"], [100], [28], [[1, 2, 0]])
    assert trace.finish("a", 140, [1, 2, 4]) == Record("a", 128, carried(100))
    assert trace.finish("b", 31, [3]) == Record("b", 30)
    lines = [Record.of_line(line) for line in out.getvalue().splitlines()]
    assert [record.rid for record in lines] == ["a", "b"]


def test_a_prefix_brings_the_boundaries_and_decoded_positions_of_whoever_computed_it(out):
    trace = Trace(out)
    trace.extend(["a"], [0], [50], [[1]])
    trace.extend(["a"], [50], [20], [[1, 2]])
    trace.finish("a", 200, [1, 2, 3, 4])
    # The first page ends before the prompt did: nothing was decoded in it.
    trace.extend(["b"], [64], [40], [[1, 5]])
    trace.extend(["c"], [192], [90], [[1, 2, 3, 6, 7]])
    assert trace.finish("b", 104, [1, 5]) == Record("b", 104, (*carried(50), Boundary(64, "cached")))
    assert trace.finish("c", 282, [1, 2, 3, 6, 7]) == Record(
        "c", 282, (*carried(50), Boundary(192, "cached")), ((70, 192),)
    )
    # What follows a hit goes on from there.
    trace.extend(["d"], [256], [20], [[1, 2, 3, 6, 8]])
    assert trace.finish("d", 276, [1, 2, 3, 6, 8]) == Record(
        "d", 276, (*carried(50), Boundary(192, "cached"), Boundary(256, "cached")), ((70, 192),)
    )


def test_pages_that_are_used_again_forget(out):
    trace = Trace(out)
    trace.extend(["a"], [0], [10], [[1]])
    trace.extend(["a"], [10], [54], [[1]])
    trace.finish("a", 64, [1])
    trace.extend(["b"], [0], [64], [[1]])
    trace.finish("b", 64, [1])
    trace.extend(["c"], [64], [9], [[1, 2]])
    assert trace.finish("c", 73, [1, 2]) == Record("c", 73, (Boundary(64, "cached"),))


def test_pages_that_the_tree_replaces_are_told(out):
    trace = Trace(out)
    trace.extend(["a"], [0], [150], [[1, 2, 3]])
    trace.finish("a", 150, [1, 2, 3])
    # Computed anew behind a hit, then dropped for what the tree holds.
    trace.extend(["b"], [64], [80], [[1, 4, 5]])
    trace.extend(["b"], [144], [60], [[1, 2, 5, 6]])
    record = trace.finish("b", 204, [1, 2, 5, 6])
    assert record == Record("b", 204, (Boundary(64, "cached"), Boundary(144, "carried")), adopted=((64, 128),))
    assert Record.of_line(out.getvalue().splitlines()[1]) == record
    # Whoever reuses what was computed behind such pages has them too.
    trace.extend(["c"], [192], [9], [[1, 2, 5, 6]])
    found = trace.finish("c", 201, [1, 2, 5, 6])
    assert found.boundaries == (*record.boundaries, Boundary(192, "cached")) and found.adopted == ((64, 128),)


def test_a_retracted_request_has_a_line_each_time_and_one_that_never_ran_none(out):
    trace = Trace(out)
    trace.extend(["a"], [0], [20], [[1]])
    trace.finish("a", 25, [1])
    trace.extend(["a", "x"], [0, 0], [26, 0], [[2], [0]])
    assert trace.finish("a", 40, [2]) == Record("a", 26)
    assert trace.finish("x", 0) is None and trace.finish("a", 40) is None
    assert [json.loads(line)["prompt"] for line in out.getvalue().splitlines()] == [20, 26]


def test_a_trace_is_a_file_that_grows(tmp_path):
    path = tmp_path / "trace.jsonl"
    for rid in ("a", "b"):
        trace = Trace.open(path)
        trace.extend([rid], [0], [5], [[1]])
        trace.finish(rid, 5, [1])
    assert read_trace(path) == (Record("a", 5), Record("b", 5))
    with pytest.raises(ResourceError, match="no trace can be written"):
        Trace.open(tmp_path / "nowhere" / "trace.jsonl")


class Full(io.StringIO):
    """A disk that has room for a line, and what its buffer holds when it is closed."""

    def __init__(self):
        super().__init__()
        self.ended = False

    def flush(self):
        if self.getvalue().count("\n") > 1:
            raise OSError(28, "No space left on device")

    def close(self):
        self.ended = True
        self.flush()


def test_a_trace_that_cannot_be_written_ends_in_one_line_and_nothing_else_does(capsys):
    out = Full()
    trace = Trace(out, "t.jsonl")
    for rid in "abc":
        trace.extend([rid], [0], [9], [[1]])
    assert trace.finish("a", 9, [1]) == Record("a", 9) and trace.active
    trace.finish("b", 9, [1])
    assert not trace.active and out.ended
    # Neither those that run nor new ones.
    trace.extend(["d"], [0], [9], [[1]])
    assert trace.finish("c", 9, [1]) is None and trace.finish("d", 9, [1]) is None
    assert capsys.readouterr().err == "kvcq: the trace ends, the server goes on: No space left on device (t.jsonl)\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_ends_a_trace(capsys):
    trace = Trace.open(Path("/dev/full"))
    trace.extend(["a"], [0], [9], [[1]])
    trace.finish("a", 9, [1])
    assert not trace.active and "No space left on device" in capsys.readouterr().err


def test_a_line_without_its_end_is_left_out(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(Record("a", 5).line() + Record("b", 6).line()[:-9])
    assert read_trace(path) == (Record("a", 5),)
