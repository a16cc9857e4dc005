from kvcq.evaluation.warnings import centring_warnings, collapse_warnings, context_warnings
from kvcq.spec.codec import CodecSpec
from kvcq.spec.plan import LayerPlan
from kvcq.spec.report import AttentionMetrics, LayerReport


def plan(layer: int, *, centred: bool = False, quantized: bool = True) -> LayerPlan:
    if not quantized:
        return LayerPlan(layer=layer, reason="skipped")
    return LayerPlan(layer=layer, k=CodecSpec(centred=centred), v=CodecSpec())


def test_uncentred_layers_with_a_large_mean_are_named_with_the_remedy():
    (warning,) = centring_warnings([plan(0), plan(1), plan(3)], {0: 90.0, 1: 2.0, 3: 4.1})
    assert warning.startswith("layers 0, 3:")
    assert "90.0 in layer 0" in warning
    assert "oscar-centered" in warning
    assert "skip_layers=0,3" in warning


def test_centred_skipped_and_unmeasured_layers_raise_no_warning():
    layers = [plan(0, centred=True), plan(1, quantized=False), plan(2), plan(3)]
    assert centring_warnings(layers, {0: 90.0, 1: 90.0, 2: 4.0}) == []


def test_codecs_with_a_scale_of_the_channel_need_no_centring():
    specs = (
        CodecSpec(quantizer="token_group", group_tokens=32),
        CodecSpec(quantizer="levels", unit="channel", pre_rope=True),
        CodecSpec(pre_rope=True, reordered=True),
    )
    assert (
        centring_warnings(
            [LayerPlan(layer=i, k=k, v=CodecSpec()) for i, k in enumerate(specs)], dict.fromkeys(range(3), 9.0)
        )
        == []
    )
    plain = LayerPlan(layer=0, k=CodecSpec(quantizer="levels", unit="norm"), v=CodecSpec())
    assert len(centring_warnings([plain], {0: 9.0})) == 1


def test_contexts_beyond_the_target_are_named():
    (warning,) = context_warnings([2048, 8192, 16384], 4096)
    assert "8192, 16384" in warning
    assert "--target-context 16384" in warning
    assert context_warnings([2048, 4096], 4096) == []


def layer_report(layer: int, kl: float, *, qk: float = 100.0, ratio: float = 0.1) -> LayerReport:
    names = AttentionMetrics.model_fields
    metrics = AttentionMetrics(**(dict.fromkeys(names, 0.0) | {"kl": kl, "qk_error": qk}))
    return LayerReport(layer=layer, mean_ratio=ratio, metrics=metrics, kl_heads=(kl,))


def test_collapsed_layers_are_named_worst_first_with_the_measured_reason():
    entries = [
        LayerPlan(layer=0, k=CodecSpec(), v=CodecSpec()),
        LayerPlan(layer=1, k=CodecSpec(centred=True), v=CodecSpec()),
        LayerPlan(layer=2, k=CodecSpec(), v=CodecSpec()),
        LayerPlan(layer=3, reason="skipped"),
    ]
    rows = [layer_report(1, 2.0, ratio=90), layer_report(0, 50.0, ratio=44), layer_report(2, 0.9), layer_report(3, 9.0)]
    (line,) = collapse_warnings(entries, rows)
    assert line.startswith("2 of 3 coded layers collapse: layer 0 (KL 50: logits off by 10.0 RMS, |mean key|^2")
    assert "layer 1 (KL 2: logits off by 10.0 RMS)" in line
    assert "layer 2" not in line and "layer 3" not in line


def test_layers_that_hold_give_no_collapse_warning():
    assert collapse_warnings([LayerPlan(layer=0, k=CodecSpec(), v=CodecSpec())], [layer_report(0, 0.5)]) == []
