"""Grafit (Touvron et al. 2021): fine classes from coarse labels."""
