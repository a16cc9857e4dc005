"""Attention fidelity on the path that is served: metrics, simulated attention, the canary, gates and warnings."""
