"""Every convnet of timm and torchvision: recast exactly? `PYTHONPATH=benchmarks python -m zoo`."""
