"""SHA-256 of tensors and texts: of the content of a saved file, and of a network."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn


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


def fingerprint(model: nn.Module) -> str | None:
    """Return the `checksum` of a model's weights and buffers; None where they have no values (device meta)."""
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return None if any(value.is_meta for value in state.values()) else checksum(state)
