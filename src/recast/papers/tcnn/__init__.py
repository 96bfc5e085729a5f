"""Transformed CNNs (d'Ascoli et al. 2021): the small networks of its experiments."""
