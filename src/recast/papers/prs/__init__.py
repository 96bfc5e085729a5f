"""PRS and C-MHSA (progressive reparameterization)."""
