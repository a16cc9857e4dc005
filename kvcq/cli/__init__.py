"""Thin Typer commands, one file a verb."""
