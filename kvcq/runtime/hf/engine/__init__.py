"""The embedded engine: many requests on one model, each with a cache of its own."""
