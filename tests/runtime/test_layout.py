import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcq.runtime.layout import (
    PAGE,
    bits_per_element,
    constants_bytes,
    kv_bytes_per_token,
    page_bytes,
    token_bytes,
    window_bytes,
)
from kvcq.spec.codec import CodecSpec
from kvcq.spec.files import TensorEntry
from kvcq.spec.geometry import LayerGeometry, ModelGeometry
from kvcq.spec.plan import LayerPlan, Windows

INT2 = CodecSpec()
VQ = CodecSpec(quantizer="group_vq", codebook="int8")
GROUPED = CodecSpec(groups=4)
EXACT = CodecSpec(quantizer="none")
FP32 = CodecSpec(metadata="fp32-zero")
SAW = CodecSpec(bits=4)
TURBO = CodecSpec(quantizer="levels", unit="norm", bits=3)
KIVI = CodecSpec(quantizer="token_group", group_tokens=128)
KIVI_SHORT = CodecSpec(quantizer="token_group", group_tokens=32)
KITTY = CodecSpec(quantizer="token_group", group_tokens=128, promoted=0.125)
NUQ_K = CodecSpec(quantizer="levels", unit="channel", outliers=0.01, pre_rope=True)
NUQ_V = CodecSpec(quantizer="levels", unit="range", outliers=0.01)
ROTATE = CodecSpec(groups=2, pre_rope=True)


def model(kinds=("full", "full", "full"), d=64, heads=3):
    layers = [
        LayerGeometry(layer=i, kind=kind, q_heads=3 * heads, kv_heads=heads, d_k=d, d_v=d)
        for i, kind in enumerate(kinds)
    ]
    return ModelGeometry(model_type="llama", hidden_size=576, vocab_size=128, layers=tuple(layers))


def plan(*sides):
    return [
        LayerPlan(layer=i, k=pair[0], v=pair[1]) if pair else LayerPlan(layer=i, reason="--skip-layers")
        for i, pair in enumerate(sides)
    ]


@pytest.mark.parametrize(
    ("k", "v", "d", "expected", "bits"),
    [
        (INT2, INT2, 128, (64, 8), 2.25),
        (INT2, INT2, 64, (32, 8), 2.5),
        (VQ, INT2, 128, (64, 8), 2.25),
        (VQ, INT2, 64, (32, 8), 2.5),
        (GROUPED, GROUPED, 128, (64, 32), 3.0),
        (INT2, GROUPED, 128, (64, 32), 3.0),
        (FP32, FP32, 128, (64, 16), 2.5),
        (EXACT, EXACT, 64, (256, 0), 16.0),
        (EXACT, INT2, 64, (144, 8), 9.5),
        (CodecSpec(bits=3), INT2, 64, (40, 8), 3.0),
        (SAW, SAW, 128, (128, 8), 4.25),
        (ROTATE, CodecSpec(groups=2), 128, (64, 16), 2.5),
    ],
)
def test_bytes_of_a_token(k, v, d, expected, bits):
    assert token_bytes(k, v, d, d) == expected
    assert page_bytes(k, v, d, d) == PAGE * sum(expected)
    assert 8 * page_bytes(k, v, d, d) / (PAGE * 2 * d) == bits


@pytest.mark.parametrize(
    ("k", "v", "d", "codes", "metadata", "bits"),
    [
        # Two float16 norms.
        (TURBO, TURBO, 128, 48 + 48, 2 + 2, 3.125),
        (TURBO, TURBO, 64, 24 + 24, 2 + 2, 3.25),
        # 128 channels have {scale, min}, 4 bytes each, for 128 tokens; the value row has its own 4 bytes.
        (KIVI, INT2, 128, 32 + 32, 4 + 4, 2.25),
        (KIVI, INT2, 64, 16 + 16, 2 + 4, 2.375),
        (KIVI_SHORT, CodecSpec(groups=4), 128, 32 + 32, 16 + 16, 3.0),
        # 16 channels of 128 have two more bits, and a byte each for 128 tokens says which.
        (KITTY, INT2, 128, 36 + 32, 4 + 16 / 128 + 4, 2.37890625),
        # 1 % of 128 keys in three bytes each and a byte of count; one value in three bytes beside {half, middle}.
        (NUQ_K, NUQ_V, 128, 32 + 32, 1.28 * 3 + 1 + 4 + 3, 2.37),
        # Channels beyond 256 need two bytes of index.
        (NUQ_K, NUQ_V, 512, 128 + 128, 5.12 * 4 + 1 + 4 + 5 * 4, 2 + 45.48 / 128),
        (TURBO, EXACT, 64, 24 + 128, 2, 9.625),
        (TURBO, VQ, 64, 24 + 16, 2 + 2, 2.75),
    ],
)
def test_codecs_outside_of_pages_count_what_they_need_side_by_side(k, v, d, codes, metadata, bits):
    assert token_bytes(k, v, d, d) == pytest.approx((codes, metadata))
    assert 8 * sum(token_bytes(k, v, d, d)) / (2 * d) == pytest.approx(bits)
    assert token_bytes(v, k, d, d) == pytest.approx((codes, metadata))
    with pytest.raises(ValueError, match="no page holds it: "):
        page_bytes(k, v, d, d)


def test_a_cache_of_codecs_outside_of_pages_has_fractional_bytes():
    entries, geometry = plan((KITTY, INT2), None, None), model(d=128)
    assert kv_bytes_per_token(entries, geometry) == 3 * (68 + 8.125) + 2 * 3 * 2 * 128 * 2
    entry = bits_per_element(entries, geometry, Windows(), 1024)
    assert (entry.codes, entry.metadata) == (2.125, 8 * 8.125 / 256)
    assert entry.windows == pytest.approx(16 * 384 / 1024)


def test_keys_and_values_may_differ_in_width():
    assert token_bytes(INT2, INT2, 192, 128) == (80, 8)


@pytest.mark.parametrize("context", [64, 2048, 8192])
def test_bits_count_codes_metadata_and_windows(context):
    entry = bits_per_element(plan(*[(VQ, INT2)] * 3), model(), Windows(), context)
    assert (entry.codes, entry.metadata) == (2.0, 0.5)
    assert entry.windows == pytest.approx(16 * (64 + 256 + 64) / context)
    assert entry.total == pytest.approx(entry.codes + entry.metadata + entry.windows)


@given(st.integers(1, 100_000), st.integers(0, 128), st.integers(0, 512), st.sampled_from([64, 80, 96, 128, 256]))
def test_bits_equal_the_allocated_bytes(context, sink, recent, d):
    geometry, windows = model(d=d), Windows(sink=sink, recent=recent)
    entries = plan((VQ, GROUPED), None, (INT2, INT2))
    pages = -(-context // PAGE)
    blocks = 3 * pages * (page_bytes(VQ, GROUPED, d, d) + page_bytes(INT2, INT2, d, d))
    allocated = blocks + window_bytes(entries, geometry, windows)
    elements = context * 2 * 3 * 2 * d
    assert bits_per_element(entries, geometry, windows, context).total == pytest.approx(8 * allocated / elements)


def test_bits_fall_towards_the_codes_with_context():
    totals = [bits_per_element(plan((INT2, INT2)), model(), Windows(), 2**n).total for n in range(6, 20)]
    assert totals == sorted(totals, reverse=True) and totals[-1] == pytest.approx(2.5, abs=0.02)


def test_a_plan_without_codes_is_bf16():
    entry = bits_per_element(plan(None, None, None), model(), Windows(), 4096)
    assert (entry.total, entry.codes) == (16.0, 16.0)
    assert kv_bytes_per_token(plan(None, None, None), model()) == 3 * 3 * 2 * 64 * 2


def test_one_more_token_costs_codes_or_bf16_in_full_layers_only():
    geometry = model(("full", "sliding", "full", "shared", "linear"))
    entries = plan((INT2, INT2), None, None, None, None)
    assert kv_bytes_per_token(entries, geometry) == 3 * (32 + 8) + 3 * 2 * 64 * 2


def test_window_bytes_are_rows_of_quantized_layers():
    assert window_bytes(plan((INT2, INT2), None, None), model(), Windows()) == 384 * 3 * 128 * 2


def test_constants_count_by_dtype():
    shapes = {"F32": (3, 64, 64), "I8": (3, 16, 256, 4), "F16": (2,)}
    tensors = [TensorEntry(name=f"t{d}", role="x", shape=s, dtype=d) for d, s in shapes.items()]
    assert constants_bytes(tensors) == 4 * 3 * 64 * 64 + 3 * 16 * 256 * 4 + 4
    with pytest.raises(ValueError, match="C64"):
        constants_bytes([TensorEntry(name="t", role="x", shape=(1,), dtype="C64")])


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="positive"):
        bits_per_element([], model(), Windows(), 0)
    with pytest.raises(ValueError, match="layer 3"):
        bits_per_element(plan(*[(INT2, INT2)] * 4), model(), Windows(), 64)


def test_layout_needs_neither_torch_nor_numpy():
    code = "import kvcq.runtime.layout, sys; sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
