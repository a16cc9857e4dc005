"""OSCAR on centred keys and values: what models with key biases need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcq.methods.oscar import Oscar


@dataclass(frozen=True)
class OscarCentered(Oscar):
    """`Oscar` on ``k - mu`` and ``v - nu`` with mu = E k and nu = E v per KV head.

    C_Q stays as it is: it is a moment of queries, and softmax does not see ``q . mu`` when every key is shifted.
    The logit energies are those of the *centred* keys, for the same reason: with the mean in them all weights
    become alike on the very models that need centring. C_S weights the centred values, which are what is coded.
    ``attention_output`` stays uncentred: the mean attention output is not nu and is not collected.
    """

    name = "oscar-centered"
    summary = "OSCAR on mean-free keys and values: for models with key biases"
    paper = "arXiv 2605.17757, with offsets"
    centred: ClassVar[bool] = True
