"""The recipe: every choice that a fit makes, resolved, as it is stored in the artifact."""

from __future__ import annotations

from pydantic import Field

from kvcq.spec.base import SpecModel
from kvcq.spec.plan import Windows

Scalar = bool | int | float | str | None


class Recipe(SpecModel):
    """A method with its parameters and the choices common to all methods.

    Attributes:
        method: Name in the method registry.
        params: The method's own fields, all of them once resolved.
        windows: Exact tokens at both ends of the context.
        skip_layers: Layer ids to keep in BF16.
        target_context: Statistics are averaged over positions below this length; None: as collected.
        seed: Seed of every random choice in fit.
    """

    method: str
    params: dict[str, Scalar] = Field(default_factory=dict)
    windows: Windows = Windows()
    skip_layers: tuple[int, ...] = ()
    target_context: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**32)
