"""DeiT, DeiT III, CaiT, ResMLP: variants that timm lacks."""
