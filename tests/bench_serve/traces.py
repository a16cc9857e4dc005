"""A hand-made trace of decode steps, as the profiler of SGLang writes them."""

from __future__ import annotations

# One step of two layers: (name, microseconds), one after the other with a microsecond between them.
LAYER = (
    ("void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>(...)", 2.0),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNN", 30.0),
    ("_map", 3.0),
    ("write_uniform", 4.0),
    ("decode", 20.0),
    ("join_kernel", 5.0),
    ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>(...)", 25.0),
)
STEP = (
    ("void at::native::indexSelectSmallIndex<c10::BFloat16>(...)", 1.0),
    ("_plan", 6.0),
    *LAYER,
    *LAYER,
    ("void at::native::reduce_kernel<512, 1, at::native::ArgMaxOps<float> >(...)", 9.0),
)
# Busy time by hand: gemm 2 (30 + 25), attention 6 + 2 (3 + 20 + 5), quantize 2 * 4, other 1 + 9 + 2 * 2.
CLASSES = {"gemm": 110.0, "attention": 62.0, "quantize": 8.0, "other": 14.0}
GAP, BETWEEN = 1.0, 11.0
LENGTH = sum(duration for _, duration in STEP) + GAP * (len(STEP) - 1) + BETWEEN


def make_events(steps: int = 5, *, launches: bool = True) -> list[dict]:
    """Return the events of whole steps, behind the second half of one and before the first half of another."""
    events = [
        {"ph": "M", "name": "process_name", "pid": 0},
        {"ph": "X", "cat": "cpu_op", "name": "decode", "ts": 0.0, "dur": 9999.0},
    ]
    time = 1000.0
    for number in range(steps + 2):
        kernels = STEP[len(STEP) // 2 :] if number == 0 else STEP[: len(STEP) // 2] if number > steps else STEP
        if launches and number:
            event = {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": time - 50, "dur": 8.0}
            events.append(event)
        for name, duration in kernels:
            events.append({"ph": "X", "cat": "kernel", "name": name, "ts": time, "dur": duration})
            time += duration + GAP
        time += BETWEEN - GAP
    return events
