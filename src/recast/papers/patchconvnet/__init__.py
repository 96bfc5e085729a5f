"""PatchConvNet (Touvron et al. 2021)."""
