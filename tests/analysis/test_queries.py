"""Maps of some queries: against the layer's own, and the query that the report shows."""

from collections.abc import Callable

import torch

from recast import CMHSA, GPSA, Geometry, RecastConfig
from recast.lab.analysis.queries import rows_of, telling_query
from recast.layers.config import PAPERS_LAYER

PLAIN = Geometry((3, 3), padding=(1, 1, 1, 1))
PAPERS = RecastConfig(**PAPERS_LAYER)


def test_maps_of_some_queries_are_the_maps(open_gates: Callable[..., GPSA]) -> None:
    x, at = torch.randn(3, 4, 5, 6), torch.tensor([0, 3, 17, 29])
    for config in ({}, {"gate": "sigmoid"}):
        layer = open_gates(GPSA(4, 3, PLAIN, config=RecastConfig(**PAPERS_LAYER | config))).eval()
        assert torch.allclose(rows_of(layer, x)(at), layer.attention(x).mix[:, :, at], atol=1e-6)
    biased = CMHSA(4, 3, PLAIN, config=RecastConfig(gate="bias", bias_init=3.0)).eval()
    biased.set_size_(5, 6)
    assert torch.allclose(rows_of(biased, x)(at), biased.attention(x)[:, :, at], atol=1e-6)


def test_the_telling_query_is_the_one_whose_maps_differ_most(open_gates: Callable[..., GPSA]) -> None:
    torch.manual_seed(0)
    layer, x = open_gates(GPSA(4, 3, PLAIN, config=PAPERS)).eval(), torch.randn(3, 4, 7, 6)
    mix = layer.attention(x).mix
    at = int((mix - mix.mean(0)).abs().sum((0, 1, 3)).argmax())
    maps, query = telling_query(layer, x)
    assert query == divmod(at, 6)
    assert telling_query(GPSA(2, 2, PLAIN, config=PAPERS), torch.randn(2, 2, 7, 9))[1] == (3, 4)  # none differ: middle
    assert torch.allclose(maps, mix[:, :, at].unflatten(-1, (9, 8))[..., 1:-1, 1:-1])
