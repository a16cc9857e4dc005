"""What makes a check right: numbers near float64, and the same bits from a replayed graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvcq.pipeline.bench.candidate import poison
from kvcq.pipeline.bench.timing import Call

# The relative error, and what else is wrong.
Verdict = tuple[float, str | None]

# Of a row by itself: few numbers round better or worse than many do.
ALONE = 2.0


def rows_verdict(found: Tensor, wanted: Tensor, limit: float) -> Verdict:
    """Compare outputs ``[rows, ...]`` with float64, so that every row counts the same, whatever its size.

    The error is the root mean square of the rows' ``|found - wanted| / |wanted|``; a row that must be zero is exactly
    zero, and no row has an error of more than twice the limit.
    """
    wanted, found = wanted.double().flatten(1), found.double().flatten(1)
    norms = wanted.norm(dim=1)
    shown = norms > 0
    if bool((found[~shown] != 0).any()):
        return math.inf, "a row that must be zero is not"
    errors = ((found - wanted)[shown].norm(dim=1) / norms[shown]).nan_to_num(math.inf, math.inf)
    worst = float(errors.max())
    error = float(errors.square().mean().sqrt())
    if worst > ALONE * limit:
        row = int(shown.nonzero()[errors.argmax()])
        return error, f"row {row} has a relative error of {worst:.2e}, at most {ALONE * limit:g} is right"
    return error, None


def after_replay(
    call: Call, outs: Sequence[Tensor], judge: Callable[[], Verdict], *, before: Sequence[Tensor] = ()
) -> Verdict:
    """Launch over NaN, judge, and launch again over NaN out of a graph, which must write the same bits.

    Args:
        call: Launches on the current stream; outside of CUDA the second time is a plain call too.
        outs: What it writes, in whole or in part.
        judge: Says how right they are.
        before: Workspaces that hold NaN before as well.
    """
    poison([*outs, *before])
    call()
    error, problem = judge()
    if problem is not None:
        return error, problem
    eager = [out.clone() for out in outs]
    again = captured(call) if outs[0].is_cuda else call
    poison([*outs, *before])
    again()
    same = all(same_bits(one, two) for one, two in zip(eager, outs, strict=True))
    return error, None if same else "a replayed graph differs from eager launches"


def captured(call: Call) -> Call:
    """Return the replay of a graph of launches that have run once."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Tell whether two tensors hold the same bytes; NaN equal themselves."""
    return torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))
