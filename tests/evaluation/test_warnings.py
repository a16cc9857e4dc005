from kvcq.evaluation.warnings import centring_warnings, context_warnings
from kvcq.spec.codec import CodecSpec
from kvcq.spec.plan import LayerPlan


def plan(layer: int, *, centred: bool = False, quantized: bool = True) -> LayerPlan:
    if not quantized:
        return LayerPlan(layer=layer, reason="skipped")
    return LayerPlan(layer=layer, k=CodecSpec(centred=centred), v=CodecSpec())


def test_uncentred_layers_with_a_large_mean_are_named_with_the_remedy():
    (warning,) = centring_warnings([plan(0), plan(1), plan(3)], {0: 90.0, 1: 2.0, 3: 4.1})
    assert warning.startswith("layers 0, 3:")
    assert "90.0 in layer 0" in warning
    assert "oscar_centered" in warning
    assert "skip_layers=0,3" in warning


def test_centred_skipped_and_unmeasured_layers_raise_no_warning():
    layers = [plan(0, centred=True), plan(1, quantized=False), plan(2), plan(3)]
    assert centring_warnings(layers, {0: 90.0, 1: 90.0, 2: 4.0}) == []


def test_contexts_beyond_the_target_are_named():
    (warning,) = context_warnings([2048, 8192, 16384], 4096)
    assert "8192, 16384" in warning
    assert "--target-context 16384" in warning
    assert context_warnings([2048, 4096], 4096) == []
