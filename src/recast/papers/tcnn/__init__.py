"""Transformed CNNs (d'Ascoli et al. 2021)."""
