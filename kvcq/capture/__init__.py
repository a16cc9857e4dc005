"""From a model's forward pass to accumulated statistics, behind a self-check."""
