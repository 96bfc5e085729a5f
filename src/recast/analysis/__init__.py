"""Attention maps of any network."""
