"""Mergeable streaming statistics of attention inputs and outputs."""
