"""The strict base of every spec model: frozen, and unknown fields are refused."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class SpecModel(BaseModel):
    """An immutable record that forbids unknown fields, infinities and NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def plain(self) -> dict[str, Any]:
        """Return the record as JSON-ready Python values, ready for `canonical.dumps`."""
        return self.model_dump(mode="json")
