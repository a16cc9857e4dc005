"""Fidelity of a quantized cache: attention metrics, the canary, gates."""
