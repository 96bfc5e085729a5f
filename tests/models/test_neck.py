import pytest
import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from recast.papers.dense.neck import Neck
from recast.papers.dense.segment.networks import UperHead, fcn_head

CLASSES = 150


@pytest.mark.parametrize(("name", "parameters", "gmac"), [("s60", 57_113_508, 951.2), ("b60", 140_612_148, 1256.5)])
def test_the_published_upernets(name: str, parameters: int, gmac: float) -> None:
    """Parameters to the unit, the unused pooling and classifier included; GMAC at 512×2048 without the auxiliary."""
    with torch.device("meta"):
        network = timm.create_model(f"patchconvnet_{name}").eval().requires_grad_(False)
        neck = Neck(network.embed_dim).eval().requires_grad_(False)
        head = UperHead(neck.channels, CLASSES).eval().requires_grad_(False)
        parts = (network, neck, head, fcn_head(network.embed_dim, CLASSES))
        assert sum(p.numel() for part in parts for p in part.parameters()) == parameters
        with FlopCounterMode(display=False) as flops:
            logits = head(neck(network.forward_features(torch.empty(1, 3, 512, 2048))))
    assert logits.shape == (1, CLASSES, 128, 512)
    assert flops.get_total_flops() / 2e9 == pytest.approx(gmac, rel=1e-3)


def test_what_each_map_is() -> None:
    neck = Neck(4).eval()
    x = torch.randn(1, 4, 4, 6)
    p4, p8, p16, p32 = neck(x)
    assert p16 is x
    # a transposed convolution 2×2 of stride 2 makes a 2×2 tile of every pixel
    tile = torch.einsum("c,cdij->dij", x[0, :, 1, 2], neck.up8.weight) + neck.up8.bias[:, None, None]
    torch.testing.assert_close(p8[0, :, 2:4, 4:6], tile)
    odd = neck(torch.randn(2, 4, 5, 7))
    assert [tuple(m.shape[-2:]) for m in odd] == [(20, 28), (10, 14), (5, 7), (2, 3)]
    torch.testing.assert_close(p32, x.unfold(2, 2, 2).unfold(3, 2, 2).amax((-2, -1)))
    first, norm, second = neck.up4[0], neck.up4[1], neck.up4[3]
    torch.testing.assert_close(p4, second(nn.functional.gelu(norm(first(x)))))
