"""Invertible linear maps of head vectors."""
