"""Recast: trained convolutions get attention, beside or in their place, and the network computes what it did before.

>>> plan = recast.plan(model, example)            # reads only
>>> recast.recast_(model, plan)                   # changes the layers
>>> recast.verify(parent, model, batch)           # shows that nothing changed

Names are imported on first use (PEP 562), so that `import recast` does not import torch. No module of the package
has the name of a public function: importing a submodule binds it on the package and would hide the function.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from recast._version import __version__ as __version__

if TYPE_CHECKING:
    from recast.analysis.record import record as record
    from recast.analysis.wakefulness import awake as awake
    from recast.errors import RecastError as RecastError
    from recast.exporting import export as export
    from recast.io import load as load
    from recast.io import save as save
    from recast.layers.beside import AttentionBeside as AttentionBeside
    from recast.layers.cmhsa import CMHSA as CMHSA
    from recast.layers.config import RecastConfig as RecastConfig
    from recast.layers.geometry import Geometry as Geometry
    from recast.layers.gpsa import GPSA as GPSA
    from recast.layers.pool_config import PoolConfig as PoolConfig
    from recast.surgery.apply import recast_ as recast_
    from recast.surgery.during_training import recast_during_training_ as recast_during_training_
    from recast.surgery.folding.model import fold_ as fold_
    from recast.surgery.parameters import param_groups as param_groups
    from recast.surgery.plan import Plan as Plan
    from recast.surgery.planning import plan as plan
    from recast.surgery.pooling.swap import attention_pool_ as attention_pool_
    from recast.surgery.schedule import Schedule as Schedule
    from recast.surgery.tuning import tune_ as tune_
    from recast.surgery.verify import trace as trace
    from recast.surgery.verify import verify as verify
    from recast.surgery.wake import wake_ as wake_

_HOME = {
    "AttentionBeside": "layers.beside",
    "CMHSA": "layers.cmhsa",
    "GPSA": "layers.gpsa",
    "Geometry": "layers.geometry",
    "Plan": "surgery.plan",
    "PoolConfig": "layers.pool_config",
    "RecastConfig": "layers.config",
    "RecastError": "errors",
    "Schedule": "surgery.schedule",
    "attention_pool_": "surgery.pooling.swap",
    "awake": "analysis.wakefulness",
    "export": "exporting",
    "fold_": "surgery.folding.model",
    "load": "io",
    "param_groups": "surgery.parameters",
    "plan": "surgery.planning",
    "recast_": "surgery.apply",
    "recast_during_training_": "surgery.during_training",
    "record": "analysis.record",
    "save": "io",
    "trace": "surgery.verify",
    "tune_": "surgery.tuning",
    "verify": "surgery.verify",
    "wake_": "surgery.wake",
}
"""Public name → the module that it comes from."""

__all__ = sorted(("__version__", *_HOME))


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'recast' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"recast.{_HOME[name]}"), name)
    globals()[name] = value  # the next access does not come through here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
