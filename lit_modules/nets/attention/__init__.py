"""Attention layers, one concept a file."""
