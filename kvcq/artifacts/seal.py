"""Sealed JSON: a header that carries the SHA-256 of itself, written and read in its one canonical form."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kvcq.artifacts.kinds import AGAIN
from kvcq.errors import CorruptArtifactError, InputError, MismatchError
from kvcq.spec import canonical
from kvcq.version import __version__

Record = TypeVar("Record", bound=BaseModel)


def seal(record: Record) -> Record:
    """Return the record with `digest` set to the SHA-256 of its canonical form without that field."""
    plain = record.model_dump(mode="json", exclude={"digest"})
    return record.model_copy(update={"digest": canonical.digest(plain)})


def encode(record: BaseModel) -> bytes:
    """Return the canonical JSON of a sealed record.

    Raises:
        InputError: beyond what a reader accepts, e.g. half a million sequences.
    """
    data = canonical.dumps(record.model_dump(mode="json"))
    try:
        canonical.check_limits(data)
    except ValueError as error:
        raise InputError(f"the header is too large: {error}", fix="use fewer sequences or artifacts at once") from None
    return data


def decode(data: memoryview | bytes, record: type[Record], where: str) -> Record:
    """Read a sealed record; an edited, damaged or non-canonical one is refused before it is interpreted.

    Raises:
        CorruptArtifactError: not canonical JSON, a wrong digest, unknown or missing fields, bad values.
        MismatchError: intact, but of a format version that this kvcq does not read.
    """
    try:
        plain = canonical.loads(bytes(data))
    except ValueError as error:
        raise CorruptArtifactError(f"unreadable: {_short(error)}", where=where, fix=AGAIN) from error
    wanted = record.model_fields["format"].default, record.model_fields["version"].default
    if not isinstance(plain, dict):
        raise CorruptArtifactError("not a JSON object", where=where, fix=AGAIN)
    version = _version_note(plain, wanted)
    body = {key: value for key, value in plain.items() if key != "digest"}
    if plain.get("digest") != canonical.digest(body):
        raise CorruptArtifactError(f"altered: its own digest does not match{version}", where=where, fix=AGAIN)
    if plain.get("format") != wanted[0]:
        raise CorruptArtifactError(f"not a {wanted[0]} file", where=where, fix=AGAIN)
    if version:
        raise MismatchError(
            f"this kvcq cannot read it{version}", where=where, fix=f"install kvcq {_writer(plain)} to read it"
        )
    try:
        parsed = record.model_validate_json(bytes(data))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "header"
        what = first["msg"].removeprefix("Value error, ")[:200]
        raise CorruptArtifactError(f"{ascii(field)[1:-1][:80]}: {what}", where=where, fix=AGAIN) from error
    if _again(parsed) != bytes(data):
        raise CorruptArtifactError("a field is left out or has another type", where=where, fix=AGAIN)
    return parsed


def _again(parsed: BaseModel) -> bytes | None:
    """Return the canonical form of what was understood, or None if it has none: 1e16 is read as a whole number."""
    try:
        return canonical.dumps(parsed.model_dump(mode="json"))
    except ValueError:
        return None


def _version_note(plain: dict[str, Any], wanted: tuple[str, int]) -> str:
    found = plain.get("version")
    if found == wanted[1] and not isinstance(found, bool):
        return ""
    named = found if isinstance(found, int) else ascii(found)[:40]
    return f" (format version {named}; kvcq {__version__} reads version {wanted[1]})"


def _writer(plain: dict[str, Any]) -> str:
    """Return the version of kvcq that wrote a header of a later format, as far as it says so."""
    versions = plain.get("versions")
    writer = plain.get("kvcq") or (versions.get("kvcq") if isinstance(versions, dict) else None)
    return writer if isinstance(writer, str) and re.fullmatch(r"[0-9A-Za-z.+-]{1,32}", writer) else "of a later release"


def _short(error: ValueError) -> str:
    text = ascii(str(error))[1:-1]
    return text if len(text) < 160 else text[:157] + "..."
