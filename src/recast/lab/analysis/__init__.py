"""Frequencies, similarity and heads of trained networks, as tables. Importing this package imports no torch."""
