"""Recast: trained convolutions become gated positional self-attention, and the network computes what it did before.

>>> plan = recast.plan(model, example)            # reads only
>>> recast.recast_(model, plan)                   # swaps the layers
>>> recast.verify(parent, model, batch)           # shows that nothing changed

Names are imported on first use (PEP 562), so that `import recast` does not import torch. No module of the package
has the name of a public function: importing a submodule binds it on the package and would hide the function.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recast.calibration import calibrate_
    from recast.cmhsa import CMHSA
    from recast.config import PoolConfig, RecastConfig
    from recast.errors import RecastError
    from recast.evaluation import evaluate
    from recast.explain.attention import record
    from recast.folding.model import fold_
    from recast.geometry import Geometry
    from recast.gpsa import GPSA
    from recast.io import load, save
    from recast.planning import plan
    from recast.pooling.swap import attention_pool_
    from recast.schedule import Schedule
    from recast.steps import Plan
    from recast.surgery import param_groups, recast_, refresh_gates_
    from recast.switching import recast_during_training_
    from recast.verification import trace, verify

__version__ = "0.1.0"

__all__ = [
    "CMHSA",
    "GPSA",
    "Geometry",
    "Plan",
    "PoolConfig",
    "RecastConfig",
    "RecastError",
    "Schedule",
    "__version__",
    "attention_pool_",
    "calibrate_",
    "evaluate",
    "fold_",
    "load",
    "param_groups",
    "plan",
    "recast_",
    "recast_during_training_",
    "record",
    "refresh_gates_",
    "save",
    "trace",
    "verify",
]

_HOME = {
    "CMHSA": "cmhsa",
    "GPSA": "gpsa",
    "Geometry": "geometry",
    "Plan": "steps",
    "PoolConfig": "config",
    "RecastConfig": "config",
    "RecastError": "errors",
    "Schedule": "schedule",
    "attention_pool_": "pooling.swap",
    "calibrate_": "calibration",
    "evaluate": "evaluation",
    "fold_": "folding.model",
    "load": "io",
    "param_groups": "surgery",
    "plan": "planning",
    "recast_": "surgery",
    "recast_during_training_": "switching",
    "record": "explain.attention",
    "refresh_gates_": "surgery",
    "save": "io",
    "trace": "verification",
    "verify": "verification",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'recast' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"recast.{_HOME[name]}"), name)
    globals()[name] = value  # the next access does not come through here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
