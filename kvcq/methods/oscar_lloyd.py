"""OSCAR with Lloyd-Max spacing: levels placed by mean and deviation of a row instead of by its extremes."""

from __future__ import annotations

from dataclasses import dataclass

from kvcq.methods.base import parameter
from kvcq.methods.oscar import Oscar
from kvcq.spec.codec import Spacing

SPACINGS: dict[str, Spacing] = {"nova": "lloyd-nova", "main": "lloyd-main"}


@dataclass(frozen=True)
class OscarLloyd(Oscar):
    """`Oscar` whose codes are thresholds of a normal distribution at 0 and +-0.98106527 standard deviations.

    The levels stay equally spaced, so decoders read the same affine pages: 0.98773677 deviations apart (``nova``, the
    NOVA-KV fork: least squared error for these thresholds) or 1.16739 (``main``, OSCAR's own). The releases do this in
    the prefill kernel only and for one scale a head; here every token of a cache is coded alike, and each group.
    """

    name = "oscar-lloyd"
    summary = "OSCAR with the Lloyd-Max levels of a normal distribution"
    paper = "arXiv 2605.17757, release"

    variant: str = parameter("nova", "spacing of the levels: of the NOVA-KV fork or of OSCAR", choices=tuple(SPACINGS))

    @property
    def spacing(self) -> Spacing:
        """How encoders place the levels."""
        return SPACINGS[self.variant]
