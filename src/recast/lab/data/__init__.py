"""Data sets by name: `load_data(DataConfig(name="digits"))`. Pixels are in [0, 1]; a model normalises for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recast.lab.plugins import public_names

if TYPE_CHECKING:
    from recast.lab.data.loading import Loader as Loader
    from recast.lab.data.sources import Data as Data
    from recast.lab.data.sources import load_data as load_data

__getattr__ = public_names(__name__, {"Data": "sources", "Loader": "loading", "load_data": "sources"})
