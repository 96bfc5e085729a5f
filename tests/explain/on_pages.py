import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor


def on_pixels(layer: Any, maps: Tensor, x: Tensor) -> np.ndarray:
    """A layer's maps of all queries, (H, I, J, Y, X) over the real pixels."""
    size = x.shape[-2:]
    at_rows, at_columns = layer.geometry.pixels(*size)
    queries = [len(at) for at in layer.geometry.query_positions(*size)]
    grid = maps[0].unflatten(-1, layer.geometry.padded_size(*size))[..., at_rows, at_columns]
    return grid.unflatten(1, queries).detach().numpy()


def data_of(path: Path) -> Any:
    """The data of a page."""
    (text,) = re.findall(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return json.loads(text)
