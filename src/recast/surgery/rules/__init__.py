"""Which modules can be recast, and how: a rule reads a convolution and returns a layer of attention with its weights.

Rules never change the module they read; the swap itself is `recast.recast_`.
"""

from recast.surgery.rules.convolutions import computes_weight, effective_weight, pads_same  # registers the rules
from recast.surgery.rules.registry import (
    Rule,
    check_finite,
    convert,
    find_rule,
    held_elsewhere,
    is_convolution,
    parametrization_of,
    recasts,
    refusal,
)  # fmt: skip

__all__ = [
    "Rule", "check_finite", "computes_weight", "convert", "effective_weight", "find_rule", "held_elsewhere",
    "is_convolution", "pads_same", "parametrization_of", "recasts", "refusal",
]  # fmt: skip
