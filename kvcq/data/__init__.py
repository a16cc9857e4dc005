"""Calibration text to token sequences."""
