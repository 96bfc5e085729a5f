"""Data sets by name: `load_data(DataConfig(name="digits"))`. Pixels are in [0, 1]; a model normalises for itself."""

from __future__ import annotations

from recast.lab.data.loading import Loader
from recast.lab.data.sources import Data, load_data

__all__ = ["Data", "Loader", "load_data"]
