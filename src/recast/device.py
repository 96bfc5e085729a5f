"""Which device a run uses."""

from __future__ import annotations

import torch

from recast.errors import RecastError


def choose_device(name: str | torch.device = "auto") -> torch.device:
    """`auto` is the accelerator that is there, else the CPU. Raises RecastError for a device that is not."""
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it computes nothing")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise RecastError(
            f"device {str(name)!r} cannot be used here ({reason}): use device=cpu or device=auto"
        ) from None
    return device
