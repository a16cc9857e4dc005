"""Channel orders. A permutation is an index list `perm`: column c of the result is column ``perm[c]``."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvcq.transforms.hadamard import power_of_two_divisor

Partition = Literal["deal", "snake", "sorted", "random"]


def bit_reversal(n: int) -> Tensor:
    """Return br [n] int64: i with its log2(n) bits reversed.

    Raises:
        ValueError: `n` is not a power of two.
    """
    if power_of_two_divisor(n) != n:
        raise ValueError(f"bit reversal needs a power of two, not {n}")
    bits = n.bit_length() - 1
    return torch.tensor([int(format(i, f"0{bits}b")[::-1], 2) if bits else 0 for i in range(n)])


def spread_order(d: int) -> Tensor:
    """Return perm [d] that follows an *ascending* spectrum in the OSCAR composition: ``perm[c] = d - 1 - br(c)``.

    Bit reversal is undefined when d is not a power of two; there the ranks are dealt with the stride d / b
    (b: largest power-of-two divisor), so that each Hadamard block receives every (d / b)-th rank.
    """
    if power_of_two_divisor(d) == d:
        return d - 1 - bit_reversal(d)
    return d - 1 - partition("deal", d, power_of_two_divisor(d))


def partition(name: Partition, d: int, group: int = 4, seed: int = 0) -> Tensor:
    """Return perm [d] that puts descending spectral ranks into d / group consecutive groups.

    With L = d / group: ``deal`` gives group l the ranks l, l + L, l + 2L ... (equal volumes, NOVA-KV); ``snake``
    deals back and forth; ``sorted`` keeps the ranks in order; ``random`` is a seeded shuffle.

    Raises:
        ValueError: `group` does not divide `d`, or the name is unknown.
    """
    if group < 1 or d % group:
        raise ValueError(f"groups of {group} channels do not divide a head dim of {d}")
    ranks = torch.arange(d).reshape(group, d // group)
    if name == "sorted":
        return torch.arange(d)
    if name == "random":
        return torch.randperm(d, generator=torch.Generator().manual_seed(seed))
    if name == "snake":
        ranks[1::2] = ranks[1::2].flip(1)
    elif name != "deal":
        raise ValueError(f"unknown partition {name!r}: deal, snake, sorted or random")
    return ranks.T.reshape(-1)
