"""Stands in for SGLang in tests: nothing but a server process."""
