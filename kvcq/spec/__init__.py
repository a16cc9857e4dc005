"""Torch-free vocabulary shared by every room: geometry, recipe, codec spec, plan, digests."""
