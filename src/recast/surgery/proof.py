"""Claims about a recast model beside its plan. `save` writes them into the file, `check` verifies them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict
from torch import Tensor, nn

from recast.surgery.exactness import Exactness
from recast.surgery.records import Folded
from recast.surgery.wrappers import unwrapped


@dataclass(frozen=True)
class Proof:
    """Origin of a model, and the results of comparing, folding and exporting it."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # nothing in a file goes unread

    parent: str | None = None
    """Fingerprint of the network that was recast, as it was then."""
    verified: Exactness | None = None
    """The latest comparison with the parent that showed the same function."""
    folded: list[Folded] | None = None
    """What the latest `fold_` did."""
    exported: dict[str, dict[str, Any]] | None = None
    """Name of a file that was written of the model → what `Exported.to_dict` tells of it, and its SHA-256."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able fields that are not None."""
        values = asdict(self) | {"verified": self.verified and self.verified.to_dict()}
        return {name: value for name, value in values.items() if value is not None}


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


def proof_of(model: nn.Module) -> Proof:
    """Return the proof of a model; for a model without one, its present fingerprint."""
    network = unwrapped(model)
    proof = getattr(network, "recast_proof", None)
    return proof if isinstance(proof, Proof) else Proof(fingerprint(network))


def note_(model: nn.Module, proof: Proof) -> None:
    """Attach a proof to a model."""
    unwrapped(model).recast_proof = proof  # type: ignore[assignment]
