"""SHA-256 of tensors and texts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def checksum(*content: str | Mapping[str, Tensor] | None) -> str:
    """Return the SHA-256 of texts, and of tensors with their names, types and shapes."""
    digest = hashlib.sha256()
    for part in content:
        if not isinstance(part, Mapping):
            digest.update(f"{part!r}\n".encode())
            continue
        for name, tensor in sorted(part.items()):
            digest.update(f"{name!r} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            # as bytes: bfloat16 has no NumPy type
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
