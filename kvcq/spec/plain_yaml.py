"""YAML as a notation for plain values: no tags, no anchors, no repeated keys, small.

Recipes and gates come from other people. An anchor lets a few lines stand for gigabytes (each alias doubles what the
last one held), and PyYAML lets the last of two equal keys win in silence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 16 << 10


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise yaml.constructor.ConstructorError(None, None, "anchors and aliases are not allowed", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) != len(keys):
            raise yaml.constructor.ConstructorError(None, None, "a key is repeated", node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """Return the value of a YAML file; no more than the limit is read of it.

    Raises:
        OSError: unreadable.
        ValueError: as `load_yaml`, or not UTF-8.
    """
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    return load_yaml(data.decode("utf-8"))


def load_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        ValueError: not YAML, not plain, or more than 16 KiB; the message is one line and names the line at fault.
    """
    if len(text) > MAX_BYTES:
        raise ValueError(f"{len(text)} characters, more than the {MAX_BYTES} allowed")
    try:
        return _Loader(text).get_single_data()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable text"
        raise ValueError(f"{problem} in line {mark.line + 1}" if mark is not None else problem) from None
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        # PyYAML itself fails on a date such as 2020-13-45.
        raise ValueError(f"unreadable value: {error}") from None
