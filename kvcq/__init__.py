"""kvcq: fit, prove and serve 2-bit KV caches for HuggingFace causal language models."""

from kvcq.version import __version__

__all__ = ["__version__"]
