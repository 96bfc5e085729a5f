"""Maps of some queries are those of the layer."""

import torch

from recast import CMHSA, Geometry, RecastConfig
from recast.lab.analysis.queries import rows_of


def test_maps_of_some_queries_are_the_maps() -> None:
    config = RecastConfig(gate="bias", bias_init=3.0)
    layer = CMHSA(4, 3, Geometry((3, 3), padding=(1, 1, 1, 1)), config=config).eval()
    layer.set_size_(5, 6)
    x, at = torch.randn(3, 4, 5, 6), torch.tensor([0, 3, 17, 29])
    assert torch.allclose(rows_of(layer, x)(at), layer.attention(x)[:, :, at], atol=1e-6)
