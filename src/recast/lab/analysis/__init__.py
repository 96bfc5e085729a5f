"""Frequencies, attention and Grad-CAM of trained networks. Importing this package imports no torch."""
