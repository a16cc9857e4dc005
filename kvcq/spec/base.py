"""The strict base of every spec model: frozen, and unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints

NumberKey = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,14})$")]
"""A layer id or a context length as the key of a JSON object."""


class SpecModel(BaseModel):
    """An immutable record that forbids unknown fields, infinities and NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def plain(self) -> dict[str, Any]:
        """Return the record as JSON-ready Python values, ready for `canonical.dumps`."""
        return self.model_dump(mode="json")
