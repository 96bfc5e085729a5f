"""Every architecture of timm and torchvision: recast, verified, one row each (`recast zoo`)."""
