"""What tells a server which bundle to serve is read strictly, and the bundle must be the very one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvcq.errors import InputError, MismatchError
from kvcq.runtime.sglang import settings
from kvcq.runtime.sglang.settings import Settings

DIGEST = "0123456789abcdef" * 4
PLAIN = {"bundle": "/models/x.kvcq", "digest": DIGEST}


@pytest.mark.parametrize(
    "extra", [{}, {"trace": "/models/t.jsonl"}, {"sink_entries": 0}, {"sink_entries": 128}, {"gate": DIGEST}]
)
def test_settings_survive_the_way_through_a_configuration(extra):
    given = PLAIN | extra
    found = Settings.of_config(SimpleNamespace(kvcq=given))
    assert found.plain() == given and found == Settings.of(found.plain())
    assert found.bundle == Path("/models/x.kvcq")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "not told which bundle"),
        ("x.kvcq", "'x.kvcq' is no object"),
        ([], "is no object"),
        ({}, "digest is None"),
        (PLAIN | {"bundle": "x.kvcq"}, "bundle is 'x.kvcq'"),
        (PLAIN | {"bundle": 3}, "bundle is 3"),
        ({"digest": DIGEST}, "bundle is None"),
        (PLAIN | {"digest": DIGEST.upper()}, "digest is"),
        (PLAIN | {"digest": DIGEST + "\n"}, "digest is"),
        (PLAIN | {"trace": "t.jsonl"}, "trace is 't.jsonl'"),
        (PLAIN | {"sink_entries": -1}, "sink_entries is -1"),
        (PLAIN | {"sink_entries": True}, "sink_entries is True"),
        (PLAIN | {"gate": "secret"}, "gate is 'secret'"),
        (PLAIN | {"gate": 1}, "gate is 1"),
        (PLAIN | {"sinks": 1}, "unknown key 'sinks'"),
        (PLAIN | {1: 1}, "unknown key '1'"),
    ],
)
def test_anything_else_is_refused_by_name(given, words):
    with pytest.raises(InputError, match="--json-model-override-args") as error:
        Settings.of_config(SimpleNamespace(kvcq=given))
    assert words in str(error.value)


def test_a_bundle_that_was_replaced_is_refused(monkeypatch):
    opened = SimpleNamespace(manifest=SimpleNamespace(digest="f" * 64))
    monkeypatch.setattr(settings, "open_bundle", lambda path: opened)
    assert Settings.of(PLAIN | {"digest": "f" * 64}).open() is opened
    with pytest.raises(MismatchError, match="digest ffffffffffff, the server was started for 0123456789ab"):
        Settings.of(PLAIN).open()
