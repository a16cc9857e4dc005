"""Answer one prompt with the model's own cache and with a 2-bit cache, and compare texts and bytes.

Usage: python examples/generate_packed.py BUNDLE.kvcq [MODEL] [PROMPT.txt]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import DynamicCache

import kvcq
from kvcq.models.load import load_model
from kvcq.runtime.layout import coded_bytes_per_token

PROMPT = "Python is a programming language. " * 90 + "Python was first released in the year"


def main(bundle: Path, model: str = "smollm2-135m", prompt: str = PROMPT) -> None:
    """Generate 24 tokens greedily, twice."""
    loaded = load_model(model)
    inputs = loaded.tokenizer(prompt, return_tensors="pt").to(loaded.device)

    def answer(cache: DynamicCache) -> str:
        tokens = loaded.model.generate(**inputs, max_new_tokens=24, do_sample=False, past_key_values=cache)
        return loaded.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :])

    own = DynamicCache(config=loaded.model.config)
    print("own cache: ", repr(answer(own)))
    # A with block gives the model its own attention back; so does cache.close().
    with kvcq.load_cache(bundle, loaded) as cache, torch.no_grad():
        print("2-bit cache:", repr(answer(cache)))
        numbers = cache.get_seq_length() * sum(
            layer.geometry.kv_heads * (layer.geometry.d_k + layer.geometry.d_v) for layer in cache.quantized()
        )
        print(f"{cache.get_seq_length()} tokens in {cache.allocated_bytes()} bytes, in BF16 {2 * numbers}")
        print(f"{8 * cache.allocated_bytes() / numbers:.2f} bits per element, most of them in the exact windows")
        tokens = cache.get_seq_length()
        manifest = kvcq.load_bundle(bundle).manifest
        more = coded_bytes_per_token(manifest.plan, manifest.geometry)
        print(f"each further token takes {more:.0f} bytes, in BF16 {2 * numbers // tokens}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3], *(Path(name).read_text(encoding="utf-8") for name in sys.argv[3:4]))
