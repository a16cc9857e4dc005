import pytest
import torch

from kvcq.runtime.layout import window_bytes
from kvcq.runtime.sglang.store import Moves
from kvcq.runtime.sglang.windows import WindowBuffers
from kvcq.spec.codec import CodecSpec
from kvcq.spec.geometry import LayerGeometry, ModelGeometry
from kvcq.spec.plan import LayerPlan, Windows

WINDOWS = Windows(sink=8, recent=16)


def buffers(layers=3, rows=4, entries=2, heads=2, dims=(16, 32), windows=WINDOWS):
    return WindowBuffers.reserve(
        layers=layers,
        rows=rows,
        entries=entries,
        heads=heads,
        dims=dims,
        windows=windows,
        dtype=torch.float32,
        device="cpu",
    )


def test_layers_are_views_whose_slots_are_rows_of_the_request_table():
    held, pages = buffers(), torch.zeros(1, 2, 4, dtype=torch.uint8)
    cache = held.cache(1, pages)
    assert cache.pages is pages
    assert cache.sink_k.shape == (4, 2, 8, 16)
    assert cache.sink_v.shape == (4, 2, 8, 32)
    assert cache.ring_k.shape == (4, 2, 80, 16)
    assert cache.ring_v.shape == (4, 2, 80, 32)
    for view in (cache.sink_k, cache.sink_v, cache.ring_k, cache.ring_v):
        assert view.is_contiguous()
    cache.sink_v[3] = 5
    assert (held.sink_v[1, 3] == 5).all()
    assert held.sink_v.sum() == 5 * 2 * 8 * 32


def test_kept_sinks_come_back_in_all_layers_after_their_row_has_another_owner():
    held = buffers()
    rows = torch.randn(3, 2, 8, 16), torch.randn(3, 2, 8, 32)
    for sinks, row in zip((held.sink_k, held.sink_v), rows, strict=True):
        sinks[:, 2] = row
    held.apply(Moves(keep=((2, 1),)))
    held.sink_k[:, 2], held.sink_v[:, 2] = 0, 0
    held.apply(Moves(restore=((1, 3),), exact_from=((3, 640),)))
    for sinks, row in zip((held.sink_k, held.sink_v), rows, strict=True):
        assert torch.equal(sinks[:, 3], row)
    assert held.exact_from.tolist() == [0, 0, 0, 640]


def test_sinks_are_kept_before_they_are_restored():
    held = buffers(layers=1, heads=1, dims=(16, 16))
    held.sink_k[:, 1] = 7
    held.apply(Moves(keep=((1, 0),), restore=((0, 1), (0, 2))))
    assert (held.sink_k[:, 2] == 7).all()


def test_bytes_are_those_of_every_row_and_entry():
    held = buffers()
    layer, d = 2 * 4, 16 + 32
    assert held.nbytes == 3 * layer * d * (4 * (8 + 80) + 2 * 8) + 4 * 4
    # One more request takes what the arithmetic of layouts says, in its two bytes an element.
    codec = CodecSpec(quantizer="uniform")
    layers = tuple(LayerGeometry(layer=i, kind="full", q_heads=2, kv_heads=2, d_k=16, d_v=32) for i in range(3))
    geometry = ModelGeometry(model_type="m", hidden_size=8, vocab_size=8, layers=layers)
    plan = [LayerPlan(layer=i, k=codec, v=codec) for i in range(3)]
    assert buffers(rows=5).nbytes - held.nbytes == 2 * window_bytes(plan, geometry, WINDOWS) + 4


def test_windows_of_no_sinks_have_nothing_to_move():
    held = buffers(windows=Windows(sink=0, recent=0))
    assert held.ring_k.shape[3] == 64
    held.apply(Moves(keep=((1, 0),), restore=((0, 2),), exact_from=((2, 64),)))
    assert held.exact_from[2] == 64


@pytest.mark.parametrize("change", [{"layers": 0}, {"rows": 1}, {"entries": -1}, {"heads": 0}])
def test_buffers_for_nobody_are_refused(change):
    with pytest.raises(ValueError, match="hold no request"):
        buffers(**change)
