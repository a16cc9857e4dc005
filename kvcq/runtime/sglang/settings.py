"""What reaches every process of a server about its bundle: a dict under the key ``kvcq`` of the model's configuration.

``--json-model-override-args '{"kvcq": {"bundle": "/abs/x.kvcq", "digest": "<64 hex digits>"}}'`` puts it there, and
SGLang hands the configuration to each process that it starts. No environment variable, no file besides the bundle.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcq.artifacts.bundle import Bundle, open_bundle
from kvcq.errors import InputError, MismatchError, shown

KEY = "kvcq"
FLAG = "--json-model-override-args"
FIX = f"start the server with kvcq serve, or pass {FLAG} with the bundle and its digest under {KEY!r}"
FIELDS = ("bundle", "digest", "trace", "sink_entries", "gate")

_DIGEST = re.compile("[0-9a-f]{64}")


def overrides(text: str | None) -> dict[str, Any]:
    """Return what a server's ``--json-model-override-args`` say; nothing where SGLang will refuse them."""
    try:
        plain = json.loads(text or "{}")
    except ValueError:
        return {}
    return plain if isinstance(plain, dict) else {}


@dataclass(frozen=True)
class Settings:
    """How a server uses a bundle.

    Attributes:
        bundle: Its absolute path.
        digest: What its manifest must say.
        trace: File that gets a line for every request; None: no trace.
        sink_entries: Sinks kept for later requests; None: as many as running requests.
        gate: SHA-256 of the token that opens the server, see `kvcq.runtime.sglang.gate`; None: it is open.
    """

    bundle: Path
    digest: str
    trace: Path | None = None
    sink_entries: int | None = None
    gate: str | None = None

    @classmethod
    def of(cls, given: Any) -> Settings:
        """Read the dict, strictly.

        Raises:
            InputError: not a dict, an unknown or missing key, or a value of another kind; names it.
        """
        if not isinstance(given, Mapping):
            raise InputError(f"{shown(given)} is no object", where=FLAG, fix=FIX)
        if unknown := sorted(set(map(str, given)) - set(FIELDS)):
            known = ", ".join(FIELDS)
            raise InputError(f"unknown key {shown(unknown[0])}", where=f"{FLAG}, {KEY}", fix=f"known are {known}")
        bundle, digest, entries = given.get("bundle"), given.get("digest"), given.get("sink_entries")
        trace, gate = given.get("trace"), given.get("gate")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise _wrong("digest", digest, "64 hex digits, as kvcq verify prints them")
        if entries is not None and (type(entries) is not int or entries < 0):
            raise _wrong("sink_entries", entries, "a number, 0 or more")
        if gate is not None and not (isinstance(gate, str) and _DIGEST.fullmatch(gate)):
            raise _wrong("gate", gate, "64 hex digits, or leave it out")
        return cls(_path("bundle", bundle), digest, None if trace is None else _path("trace", trace), entries, gate)

    @classmethod
    def of_config(cls, config: Any) -> Settings:
        """Read them from the model's configuration, where SGLang has put the overrides.

        Raises:
            InputError: they are not there, or not as they should be.
        """
        given = getattr(config, KEY, None)
        if given is None:
            raise InputError("the server was not told which bundle to serve", where=FLAG, fix=FIX)
        return cls.of(given)

    def plain(self) -> dict[str, Any]:
        """Return the dict that `of` reads; what has its default is left out."""
        trace = {} if self.trace is None else {"trace": str(self.trace)}
        entries = {} if self.sink_entries is None else {"sink_entries": self.sink_entries}
        gate = {} if self.gate is None else {"gate": self.gate}
        return {"bundle": str(self.bundle), "digest": self.digest, **trace, **entries, **gate}

    def open(self) -> Bundle:
        """Open the bundle.

        Raises:
            CorruptArtifactError: it is damaged.
            InputError: it is no bundle.
            MismatchError: it has another digest: it was replaced after the server was told to serve it.
        """
        bundle = open_bundle(self.bundle)
        if bundle.manifest.digest != self.digest:
            raise MismatchError(
                f"the bundle has digest {bundle.manifest.digest[:12]}, the server was started for {self.digest[:12]}",
                where=self.bundle,
                fix="start the server again with this bundle",
            )
        return bundle


def _path(name: str, value: Any) -> Path:
    if not isinstance(value, str) or not Path(value).is_absolute():
        raise _wrong(name, value, "an absolute path: servers run their processes where they like")
    return Path(value)


def _wrong(name: str, value: Any, wanted: str) -> InputError:
    return InputError(f"{name} is {shown(value)}", where=f"{FLAG}, {KEY}", fix=f"give {wanted}")
