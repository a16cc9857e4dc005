"""The 2-bit cache inside transformers: storage, the attention that reads it, and the cache that models are given."""
