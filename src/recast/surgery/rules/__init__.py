"""Which modules can be recast, and how: a rule reads a convolution and returns a layer of attention with its weights.

Rules never change the module they read; the swap itself is `recast.recast_`. `registry` finds a module's rule,
`convolutions` holds the rules, `refusal` says why a module has none.
"""

from recast.surgery.rules import convolutions as _convolutions  # registers the rules
from recast.surgery.rules.refusal import check_finite, is_convolution, refusal
from recast.surgery.rules.registry import Rule, find_rule, recasts

__all__ = ["Rule", "check_finite", "find_rule", "is_convolution", "recasts", "refusal"]
del _convolutions
