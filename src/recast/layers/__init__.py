"""The layers and their mathematics."""
