"""A packed cache by kernels beside the same one by torch: how far logits are apart, answers, and decode speed.

    python benchmarks/cache_kernels.py --bundle NAME.kvcq --model smollm2-135m --text prompt.txt

Both read the same tokens, the greedy ones of torch, so that logits are compared at equal contexts.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from kvcq.models.library import forward
from kvcq.models.load import load_model
from kvcq.runtime.hf.load import open_host


def follow(model, cache, prompt, forced, steps, chunk):
    """Return logits [steps, vocab] behind a prompt and the seconds of a step; tokens are `forced` or greedy."""
    for part in prompt.split(chunk):
        last = forward(model, part[None], cache=cache, keep=1)[0, -1]
    found, times = [last], []
    for step in range(steps - 1):
        token = found[-1].argmax().cpu() if forced is None else forced[step]
        begun = time.perf_counter()
        found.append(forward(model, token.reshape(1, 1), cache=cache, keep=1)[0, -1])
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return torch.stack(found).double().cpu(), sorted(times)[len(times) // 2]


def main() -> None:
    """Run both and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=512)
    options = parser.parse_args()
    loaded = load_model(options.model)
    text = options.text.read_text(encoding="utf-8")
    prompt = torch.tensor(loaded.tokenizer(text).input_ids[: options.prompt])
    logits, forced = [], None
    for kernels in (False, None):
        with open_host(options.bundle, loaded, kernels=kernels) as host:
            follow(loaded.model, host.new_cache(), prompt[:600], None, 4, options.chunk)  # compiles
            cache = host.new_cache()
            found, seconds = follow(loaded.model, cache, prompt, forced, options.steps, options.chunk)
            forced = found.argmax(-1) if forced is None else forced
            logits.append(found)
            print(f"{cache.kernels}: {len(prompt)} tokens and {options.steps} more, {1 / seconds:.1f} tokens/s")
    gap = (logits[1] - logits[0]).abs().amax(-1)
    same = (logits[1].argmax(-1) == logits[0].argmax(-1)).sum()
    relative = float((logits[1] - logits[0]).norm() / logits[0].norm())
    print(f"logits: relative {relative:.2e}, largest difference {float(gap.max()):.3f}, mean {float(gap.mean()):.3f}")
    print(f"greedy tokens alike: {int(same)} of {len(gap)}")


if __name__ == "__main__":
    main()
