"""The strict bases of every spec model: frozen, and unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, StringConstraints, model_serializer

NumberKey = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,14})$")]
"""A layer id or a context length as the key of a JSON object."""


class SpecModel(BaseModel):
    """An immutable record that forbids unknown fields, infinities and NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def plain(self) -> dict[str, Any]:
        """Return the record as JSON-ready Python values, ready for `canonical.dumps`."""
        return self.model_dump(mode="json")


class GrowingModel(SpecModel):
    """A record whose format gained fields: those named in `LATER` are written only when they differ from the default.

    Files written before a field existed keep their one canonical form, so they still load and their digests hold.
    """

    LATER: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        left_out = {name for name in self.LATER if getattr(self, name) == fields[name].default}
        return {name: value for name, value in handler(self).items() if name not in left_out}
