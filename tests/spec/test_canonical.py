import contextlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcq.spec import canonical

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-canonical.MAX_INTEGER + 1, canonical.MAX_INTEGER - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
texts = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=20)


@given(values)
def test_a_value_comes_back_and_encodes_to_the_same_bytes(value):
    data = canonical.dumps(value)
    assert canonical.loads(data) == value
    assert canonical.dumps(canonical.loads(data)) == data
    assert data.endswith(b"\n") and data.count(b"\n") == 1


@given(values, st.data())
def test_a_changed_byte_is_refused_or_is_another_value(value, data):
    raw = bytearray(canonical.dumps(value))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        other = canonical.loads(bytes(raw))
    except ValueError:
        return
    assert canonical.dumps(other) == bytes(raw) != canonical.dumps(value)


@given(st.binary(max_size=60))
def test_random_bytes_raise_nothing_but_value_error(data):
    with contextlib.suppress(ValueError):
        canonical.loads(data)


@given(st.dictionaries(texts, st.integers(0, 9), min_size=2))
def test_order_of_insertion_does_not_matter(value):
    backwards = dict(reversed(list(value.items())))
    assert canonical.dumps(value) == canonical.dumps(backwards)
    assert canonical.digest(value) == canonical.digest(backwards)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_are_the_repr_of_a_float64(value):
    text = canonical.dumps(value).decode().strip()
    assert text == ("0.0" if value == 0 else repr(value))
    assert float(text) == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "not finite"),
        ([math.inf], r"\$\[0\]"),
        ({"a": {"b": -math.inf}}, r"\$\.a\.b"),
        (2**53, "2\\^53"),
        (-(2**53), "2\\^53"),
        ({1: 2}, "keys"),
        ({"a": {3}}, "set has no canonical form"),
        (b"x", "bytes"),
    ],
)
def test_values_without_a_form_are_refused_with_their_place(value, message):
    with pytest.raises(ValueError, match=message):
        canonical.dumps(value)


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":1}',
        b'{"a":1}\n\n',
        b'{"a": 1}\n',
        b'{"b":1,"a":2}\n',
        b'{"a":1,"a":1}\n',
        b'"\\u00e9"\n',
        b"1.50\n",
        b"1E2\n",
        b"-0.0\n",
        b"NaN\n",
        b"9007199254740992\n",
        b"[" * 100000 + b"]" * 100000 + b"\n",
        b"\xff\n",
        b"\xef\xbb\xbf1\n",
        b'"\\ud800"\n',
        b"",
    ],
)
def test_other_encodings_of_a_value_are_refused(data):
    with pytest.raises(ValueError):
        canonical.loads(data)


def test_text_is_utf8_tuples_are_lists_and_minus_zero_is_zero():
    assert canonical.dumps({"é": (-0.0, True, None)}) == '{"é":[0.0,true,null]}\n'.encode()
    assert canonical.sha256(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert canonical.digest([]) == canonical.sha256(b"[]\n")
    assert json.loads(canonical.dumps(1e22)) == 1e22
