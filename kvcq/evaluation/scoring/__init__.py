"""Metrics of answers: from the text that a model wrote to a score between 0 and 1."""
