from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import recast.papers  # noqa: F401  (registers the small networks with timm)
from recast.errors import RecastError
from recast.lab.analysis.blocks import body_of, find_blocks
from recast.lab.analysis.fourier import diagonal_log_amplitude, fourier


def wrapped(model: nn.Module) -> nn.Module:
    """As evaluation wraps a network."""
    return nn.Sequential(OrderedDict(model=model))


def identity() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Identity()), nn.Sequential(nn.ReLU()))


def delta_of(x: Tensor) -> Tensor:
    """The curve of maps as they are."""
    (curve,) = fourier(nn.Sequential(nn.Identity()), x, blocks=["0"]).curves
    return torch.tensor(curve.delta)


def close(delta: Any, expected: Tensor, atol: float = 1e-5) -> bool:
    return torch.allclose(torch.as_tensor(delta), expected, atol=atol, rtol=0)


def test_batches_make_the_same_curves_as_one_and_the_mean_is_after_the_logarithm() -> None:
    x = torch.randn(7, 3, 9, 6)
    x[1] *= 1000
    at_once = fourier(identity(), x, blocks=["0"])
    parts = fourier(identity(), [(part, torch.zeros(len(part))) for part in x.split([2, 1, 4])], blocks=["0"])
    assert parts.n == at_once.n == 7
    assert close(parts.curves[0].delta, torch.tensor(at_once.curves[0].delta))
    alone = torch.stack([delta_of(x[i : i + 1]) for i in range(7)])
    assert close(at_once.curves[0].delta, alone.mean(0), 1e-4)


@pytest.mark.parametrize("side", [14, 7])
def test_white_noise_stands_at_half_ln_2_but_for_pi_of_even_sides(side: int) -> None:
    delta = delta_of(torch.randn(400, 10, side, side))
    bins = torch.arange(1, (side + 1) // 2) * 2 / side
    inner = np.interp(bins, np.linspace(0, 1, 31), delta)  # not at the bins themselves: within the noise all the same
    assert inner.mean() == pytest.approx(np.log(2) / 2, abs=0.06)
    assert delta[-1] == pytest.approx(np.log(2) / 2 if side % 2 else 0, abs=0.06)


@pytest.mark.parametrize(("height", "width"), [(12, 8), (8, 13), (7, 15), (5, 4), (16, 3)])
def test_rectangles_are_read_between_the_bins_of_the_longer_side(height: int, width: int) -> None:
    x = torch.randn(2, 3, height, width, dtype=torch.float64)
    logs = torch.log(torch.fft.fft2(x).abs() + 1e-6).mean((0, 1)).numpy()
    short, long = min(height, width), max(height, width)
    logs = logs if height <= width else logs.T  # (short, long)
    bins = np.arange(long // 2 + 1)
    expected = [np.interp(n * long / short, bins, logs[n, : len(bins)]) for n in range(short // 2 + 1)]
    assert diagonal_log_amplitude(x).mean((0, 1)).tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "size", "first", "count", "last"),
    [
        ("resnet10t", 64, ["stem", "layer1.0"], 5, (2, 2)),
        ("vit_tiny_patch16_224", (64, 96), ["stem", "blocks.0.attn", "blocks.0"], 25, (4, 6)),
        ("swin_tiny_patch4_window7_224", 56, ["stem", "layers.0.blocks.0.attn", "layers.0.blocks.0"], 25, (2, 2)),
        ("convnext_atto", 64, ["stem", "stages.0.blocks.0"], 13, (2, 2)),
        ("cifar_resnet20", 16, ["stem", "layer1.0"], 10, (4, 4)),
        ("cmhsa_vit_3_tiny", (16, 24), ["stem", "blocks.0.mixer", "blocks.0"], 13, (4, 6)),
        ("patchconvnet_s60", 64, ["stem", "blocks.0"], 61, (4, 4)),
    ],
)
def test_blocks_are_found(name: str, size: int | tuple[int, int], first: list[str], count: int, last: object) -> None:
    height, width = (size, size) if isinstance(size, int) else size
    options = {"img_size": (height, width)} if name.startswith(("vit", "swin")) else {}
    spectra = fourier(timm.create_model(name, **options), torch.randn(1, 3, height, width))
    assert [curve.block for curve in spectra.curves][: len(first)] == first
    assert (len(spectra.curves), spectra.left_out, spectra.curves[-1].size) == (count, {}, last)


def test_the_tokens_of_a_transformer_are_its_grid() -> None:
    """What is read after a residual is the sum itself, the class token gone, at the place of its patch."""
    network = timm.create_model("vit_tiny_patch16_224", img_size=(64, 96), depth=1).eval()
    x = torch.randn(2, 3, 64, 96)
    curves = {curve.block: curve for curve in fourier(network, x).curves}
    with torch.no_grad():
        tokens = network.norm_pre(network._pos_embed(network.patch_embed(x)))
        block = network.blocks[0]
        after_attention = tokens + block.attn(block.norm1(tokens))
        after_mlp = after_attention + block.mlp(block.norm2(after_attention))
    for name, value in (("stem", tokens), ("blocks.0.attn", after_attention), ("blocks.0", after_mlp)):
        assert close(curves[name].delta, delta_of(value[:, 1:].transpose(1, 2).reshape(2, -1, 4, 6)))


IMAGES = torch.randn(1, 3, 4, 4)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: fourier(identity(), IMAGES, blocks=["layer9"]), "no module 'layer9'"),
        (lambda: fourier(identity(), torch.randn(3, 4, 4)), r"got \(3, 4, 4\)"),
        (lambda: fourier(identity(), []), "images is empty"),
        (lambda: fourier(identity(), [IMAGES, torch.randn(1, 3, 6, 6)]), "images of one size"),
        (lambda: fourier(nn.Sequential(nn.Flatten()), IMAGES, blocks=["0"]), "neither a map"),
        (lambda: fourier(nn.Linear(3, 3), IMAGES), "no known sequence of blocks"),
        (lambda: fourier(identity(), IMAGES, blocks=[]), "at least one"),
        # Hiera keeps its tokens by windows: a spectrum of them would mean nothing
        (lambda: fourier(timm.create_model("hiera_tiny_224", img_size=64), torch.randn(1, 3, 64, 64)), "neither a map"),
    ],
)
def test_mistakes_are_named(call: Callable[[], object], match: str) -> None:
    with pytest.raises(RecastError, match=match):
        call()


def test_wrappers_are_looked_through() -> None:
    network = timm.create_model("digits_resnet")
    assert body_of(wrapped(wrapped(network))) == ("model.model.", network)
    assert find_blocks(network)[0] == "layer1.0"
    chain = wrapped(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten()))
    spectra = fourier(chain, torch.rand(1, 3, 8, 8))
    assert [curve.block for curve in spectra.curves] == ["stem", "0", "1"]
    assert "2" in spectra.left_out
    assert fourier(chain, torch.rand(1, 3, 8, 8), blocks=["model.1"]).curves[0].block == "1"
