import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcq.spec.plain_yaml import MAX_BYTES, load_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a: 1\nb: [x, 2.5, null, true]\n", {"a": 1, "b": ["x", 2.5, None, True]}),
        ("{a: {b: c}}", {"a": {"b": "c"}}),
        ("3", 3),
        ("é: 𝟙", {"é": "𝟙"}),
    ],
)
def test_plain_values_are_read(text, value):
    assert load_yaml(text) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: &x 1", "anchors and aliases are not allowed in line 1"),
        ("a: 1\nb: *x", "anchors and aliases are not allowed in line 2"),
        ("a: 1\nb: 2\na: 3", "a key is repeated in line 1"),
        ("a: {b: 1, b: 2}", "a key is repeated"),
        ("!!python/name:os.system", "could not determine a constructor"),
        ("a: [", "in line 1"),
        ("a: 1\n---\nb: 2", "in line 2"),
        ("2020-13-45", "unreadable value"),
        ("\x00", "special characters"),
        ("- " * 2000, "nested too deeply"),
        ("x" * (MAX_BYTES + 1), "more than the"),
    ],
)
def test_everything_else_is_one_line(text, says):
    with pytest.raises(ValueError, match=says) as caught:
        load_yaml(text)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=80))
def test_any_text_is_a_value_or_a_value_error(text):
    try:
        load_yaml(text)
    except ValueError as error:
        assert type(error) in (ValueError, UnicodeEncodeError)


def test_a_file_that_is_no_text_is_a_value_error(tmp_path):
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="utf-8"):
        read_yaml(tmp_path / "x")
