"""A plugin for released versions of SGLang: serves 2-bit pages from its own allocator, radix tree and scheduler."""
