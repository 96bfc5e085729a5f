"""Names of modules and weights as in the network without its wrappers."""

from __future__ import annotations

from torch import nn

WRAPPED = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Parts of names that compiled, checkpointed and sharded modules add."""


def plain_name(name: str) -> str:
    """Return the name of a module or a weight without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by `plain_name`, each once; of a wrapper and its module, the module."""
    return {plain_name(name): module for name, module in model.named_modules()}
