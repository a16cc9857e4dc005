"""What one rotation a layer costs: some models have KV heads with almost unrelated axes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from kvcq.codecs.side import SideCodec
from kvcq.spec.codec import CodecSpec
from kvcq.transforms.threads import single_threaded

# Rows of each head that the measure codes: enough for two digits, a fraction of a second for a layer.
MEASURED_ROWS = 1024
TINY = 1e-300


def key_error(spec: CodecSpec, tensors: Mapping[str, np.ndarray], keys: Tensor, metric: Tensor | None = None) -> Tensor:
    """Return the mean error of coded keys by KV head, ``(k - k_hat) M (k - k_hat)'``, ``[H]`` float64.

    Args:
        spec: Key codec.
        tensors: Its arrays by role.
        keys: ``[H, n, d]`` float32.
        metric: M ``[H, d, d]`` float64, e.g. the query moment; the identity by default.
    """
    heads, count, d = keys.shape
    with single_threaded():
        codec = SideCodec.build("k", spec, (heads, d), tensors)
        lost = (codec.back(codec.decode(codec.encode(codec.frame(keys)))) - keys).double()
        weighted = lost if metric is None else lost @ metric
        return (weighted * lost).sum((1, 2)) / count


def shared_cost(
    spec: CodecSpec, shared: Mapping[str, np.ndarray], own: Mapping[str, np.ndarray], keys: Tensor
) -> tuple[float, ...]:
    """Return, by KV head, the squared key error under the layer's shared rotation over that under the head's own.

    Well above 1 says that the heads do not share axes: fit them with ``granularity=head``. The plain error tells,
    not the query-weighted one: a wrong basis spreads the error evenly, which the weighted error may even prefer.
    """
    rows = keys[:, :MEASURED_ROWS]
    ratio = key_error(spec, shared, rows) / key_error(spec, own, rows).clamp(min=TINY)
    return tuple(ratio.tolist())
