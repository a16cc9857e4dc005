"""Loading models, their identity and geometry, and the attention hook."""
