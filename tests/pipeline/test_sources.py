from pathlib import Path

import pytest

from kvcq.errors import InputError
from kvcq.pipeline.sources import TEXT_BYTES, read_text


def test_a_small_text_file_is_read_whole_and_nothing_else(tmp_path):
    path = tmp_path / "own.jinja"
    path.write_bytes("{{ 'é' }}".encode() + b" " * (TEXT_BYTES - 10))
    text = read_text(path, "--chat-template")
    assert text is not None and text.startswith("{{ 'é' }}") and len(text.encode()) == TEXT_BYTES
    assert read_text(None, "--chat-template") is None
    path.write_bytes(b"\xff")
    for bad in (path, tmp_path, tmp_path / "none", Path("/dev/zero")):
        with pytest.raises(InputError, match=r"\(--chat-template\)"):
            read_text(bad, "--chat-template")
