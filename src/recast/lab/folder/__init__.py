"""The run folder: names of its files, its recipe, tables, and one writer at a time. Imports no torch."""
