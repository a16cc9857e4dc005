import pytest

from kvcq.capture.budget import check_tokens, estimate
from kvcq.capture.selfcheck import self_check
from kvcq.errors import InputError
from kvcq.stats.probe import choose_probe
from tests.capture.examples import collect, loaded, sequence
from tests.tiny import tiny_tokens

SOURCE = loaded("llama")
GEOMETRY = self_check(SOURCE, tiny_tokens(48))


def test_too_few_tokens_are_refused_and_few_warn():
    with pytest.raises(InputError, match="127 tokens are too few for heads of 32 channels"):
        check_tokens(GEOMETRY, 127)
    assert len(check_tokens(GEOMETRY, 128)) == 1
    assert len(check_tokens(GEOMETRY, 511)) == 1
    assert check_tokens(GEOMETRY, 512) == []


@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize("rows", [0, 50, 10_000])
def test_planned_disk_is_what_is_written(count, rows):
    sequences = [sequence(n, 90) for n in range(count)]
    plan = choose_probe([(one.digest, one.segments) for one in sequences])
    planned = estimate(SOURCE, GEOMETRY, plan, rows, 16, 90)
    part = collect(SOURCE, GEOMETRY, sequences, rows=rows, query_rows=16)[0].result
    written = sum(array.nbytes for array in part.moments.values())
    samples = sum(array.nbytes for array in part.samples.values())
    assert planned.disk_bytes == pytest.approx(written + samples, rel=0.02)
    assert planned.rows_bytes <= samples
    assert planned.memory_bytes > planned.disk_bytes
