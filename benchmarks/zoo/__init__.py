"""Exactness of every convnet of timm and torchvision: `PYTHONPATH=benchmarks python -m zoo`."""
