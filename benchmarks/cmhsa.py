"""How near the convolution C-MHSA starts: tokens and pixels, kernels 3 and 5, patches 4 and 16, biases M from 5 to 40.

    python benchmarks/cmhsa.py              # a minute; writes results/cmhsa.csv
    python benchmarks/cmhsa.py --training   # 20 minutes; writes results/cmhsa_training.csv: does attention learn?

A row per mixer, kernel, patch side and M: random weights and a random map, fp64 unless the column says fp32. Columns:
tokens (side of the map); heads; keys (L, the ring of zeros included); leaked (share of a head's attention that is not
on its tap, mean over heads and queries) and bound ((L−1)·e^−M); relative errors max|MHSA − conv| / max|conv| over the
interior (outputs whose window holds no padding), the border and all of it (fp32: the same in single precision);
no_ring: over the border when the ring of zeros is left out (the control); back: whether `to_conv` gives the kernel of
tokens again, bit for bit; ranks of W_V W_O of a pixel mixer's heads: in the middle, at a side, in a corner;
key_gradient, bias_gradient: root mean square of the gradient of W_key and of the relative bias over W_out's, of a
random loss: how much of the training reaches the attention at the start.

--training: cmhsa_vit_3_tiny on 1,297 digits of scikit-learn at 32×32, convolutions for 3 epochs, then C-MHSA in all
six layers for 6, AdamW 1e-3, batches of 50, for every M. Columns: off_tap (share of attention off the taps on one
batch, mean over layers, heads and queries) and key (root mean square of W_key), right after the switch and at the end;
top1 on the other 500 images before the switch, after it and at the end, in percent; loss on the training images, which
are augmented anew each time: equal networks differ by 0.01 there.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from timing import RESULTS, write
from torch import Tensor, nn
from torch.nn import functional as F

from recast.analysis.record import record
from recast.data import Data, load_data
from recast.layers.cmhsa import CMHSA, recast_layers
from recast.layers.functional.maps import shift_map
from recast.layers.functional.relative_bias import biased_maps
from recast.models.build import build
from recast.models.pixel_conv import PixelConv2d
from recast.run.config import DataConfig, ModelConfig, RecastConfig
from recast.surgery.apply import recast_
from recast.surgery.parameters import param_groups
from recast.surgery.planning import plan
from recast.surgery.rules import convert

RESULT = RESULTS / "cmhsa.csv"
TRAINING = RESULT.with_name("cmhsa_training.csv")
BIASES = (5, 10, 20, 30, 40)
SIDES = {4: 8, 16: 14}
"""Patch side: tokens a side, of a 32×32 and a 224×224 image."""
CHANNELS = 48  # of a token mixer; a pixel mixer has 3·P²


def error(a: Tensor, b: Tensor) -> float:
    """max|a − b| / max|b|."""
    return float((a - b).abs().max() / b.abs().max())


def without_ring(layer: CMHSA, x: Tensor) -> Tensor:
    """What the layer would compute if the padding were no tokens: a softmax over the pixels of the map alone."""
    geometry, (height, width) = layer.geometry, x.shape[-2:]
    outside = torch.ones(geometry.padded_size(height, width), dtype=torch.bool)
    outside[geometry.pixels(height, width)] = False
    logits = biased_maps(x, layer.weights(height, width)).mix.log()
    maps = logits.masked_fill(outside.flatten(), -math.inf).softmax(-1)
    values = geometry.pad(x).flatten(2)
    y = torch.einsum("bhnm,bcm,och->bon", maps, values, layer.weight.flatten(2)).unflatten(-1, (height, width))
    return y if layer.bias is None else y + layer.bias[:, None, None]


def gradients(layer: CMHSA, x: Tensor) -> tuple[float, float]:
    """Root mean square of the gradients of W_key and of the relative bias, over that of W_out's."""
    with torch.enable_grad():
        y = layer(x)
        found = torch.autograd.grad((y * torch.randn_like(y)).sum(), [layer.key, layer.relative_bias, layer.weight])
    key, bias, weight = (float(gradient.square().mean().sqrt()) for gradient in found)
    return key / weight, bias / weight


def rows_of(mixer: str, kernel: int, patch: int) -> Iterator[dict[str, Any]]:
    """One row for every M."""
    torch.manual_seed(0)
    side = SIDES[patch]
    conv: Any
    if mixer == "pixel":
        conv = PixelConv2d(3 * patch**2, 3 * patch**2, kernel, patch).double()
        expected_kernel = conv.token_kernel(conv.weight)
    else:
        conv = nn.Conv2d(CHANNELS, CHANNELS, kernel, padding=kernel // 2).double()
        expected_kernel = conv.weight
    x = torch.randn(1, conv.in_channels, side, side, dtype=torch.float64)
    expected = conv(x)
    for bias_init in BIASES:
        layer = convert(conv, RecastConfig(gate="bias", bias_init=float(bias_init)))
        assert isinstance(layer, CMHSA)
        layer.set_size_(side, side)
        reach = layer.geometry.anchor[0]
        border = torch.ones(side, side, dtype=torch.bool)
        border[reach:-reach, reach:-reach] = False
        y = layer(x)
        on_tap = shift_map(layer.geometry, side, side, x).bool()
        maps = layer.attention(x)[0]
        back: Any = layer.to_conv()
        key_gradient, bias_gradient = gradients(layer, x)
        ranks = torch.linalg.matrix_rank(layer.weight.permute(2, 3, 0, 1)) if mixer == "pixel" else None
        yield {
            "mixer": mixer,
            "kernel": kernel,
            "patch": patch if mixer == "pixel" else "",
            "tokens": side,
            "heads": layer.num_heads,
            "bias_init": bias_init,
            "keys": maps.shape[-1],
            "leaked": f"{float(maps.masked_fill(on_tap, 0).sum(-1).mean()):.3e}",
            "bound": f"{(maps.shape[-1] - 1) * math.exp(-bias_init):.3e}",
            "interior": f"{error(y[..., ~border], expected[..., ~border]):.2e}",
            "border": f"{error(y[..., border], expected[..., border]):.2e}",
            "fp32": f"{error(layer.float()(x.float()).double(), expected):.2e}",
            "no_ring": f"{error(without_ring(layer.double(), x)[..., border], expected[..., border]):.2e}",
            "back": torch.equal(back.weight, expected_kernel),
            "ranks": "" if ranks is None else "/".join(str(int(ranks[i, j])) for i, j in ((1, 1), (0, 1), (0, 0))),
            "key_gradient": f"{key_gradient:.1e}",
            "bias_gradient": f"{bias_gradient:.1e}",
        }


def train(model: nn.Module, data: Data, epochs: int) -> None:
    """AdamW 1e-3, batches of 50 in an order that only depends on the epoch."""
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3))
    model.train()
    for epoch in range(epochs):
        order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(epoch))
        for index in order.split(50):
            images, labels = data.train.batch(index.tolist())
            optimizer.zero_grad()
            F.cross_entropy(model(images - 0.5), labels).backward()
            optimizer.step()


@torch.no_grad()
def state(model: nn.Module, data: Data) -> dict[str, float]:
    """What a row says of a model: loss, accuracy and, once it is recast, what its attention does."""
    model.eval()
    losses, (seen, known) = [], data.val.batch(range(len(data.val)))
    for index in torch.arange(len(data.train)).split(250):
        images, labels = data.train.batch(index.tolist())
        losses.append(F.cross_entropy(model(images - 0.5), labels))
    found = {"loss": float(torch.stack(losses).mean())}
    found["top1"] = 100 * float((model(seen - 0.5).argmax(1) == known).double().mean())
    layers = recast_layers(model)
    with record(model) as maps:
        model(seen[:50] - 0.5)
    if layers:
        off = []
        for name, layer in layers.items():
            side = layer.size[0] if isinstance(layer, CMHSA) and layer.size else 0
            on_tap = shift_map(layer.geometry, side, side, seen).bool()
            off.append(maps[name].mix.masked_fill(on_tap, 0).sum(-1).mean())
        found["off_tap"] = float(torch.stack(off).mean())
        found["key"] = float(torch.stack([layer.key.square().mean() for layer in layers.values()]).mean().sqrt())
    return found


def training_rows() -> Iterator[dict[str, Any]]:
    """One row for every M, from the same network after three epochs."""
    data = load_data(DataConfig("digits", img_size=32))
    torch.manual_seed(0)
    parent = build(ModelConfig("cmhsa_vit_3_tiny", num_classes=10))
    train(parent, data, 3)
    before = state(parent, data)
    example = data.val.batch(range(1))[0]
    for bias_init in (None, 3, 5, 8, 10, 15, 20):
        model = copy.deepcopy(parent)
        if bias_init is not None:
            torch.manual_seed(0)
            model = recast_(model, plan(model, example, RecastConfig(gate="bias", bias_init=float(bias_init))))
        start = state(model, data)
        train(model, data, 6)
        end = state(model, data)
        row: dict[str, Any] = {"bias_init": "convolution" if bias_init is None else bias_init}
        row |= {"top1_before": f"{before['top1']:.2f}"}
        for name, found in (("switch", start), ("end", end)):
            row |= {f"loss_{name}": f"{found['loss']:.4f}", f"top1_{name}": f"{found['top1']:.2f}"}
            row |= {f"off_tap_{name}": f"{found.get('off_tap', 0):.2e}", f"key_{name}": f"{found.get('key', 0):.1e}"}
        print(*row.values(), sep="\t", flush=True)
        yield row


def main() -> None:
    """Measure, print and write."""
    if "--training" in sys.argv[1:]:
        write(TRAINING, list(training_rows()))
        return
    with torch.no_grad():
        start_rows()


def start_rows() -> None:
    """Every mixer, kernel, patch and M before training."""
    rows = [
        row
        for mixer, patches in (("token", (4, 16)), ("pixel", (4, 16)))
        for kernel in (3, 5)
        for patch in patches
        for row in rows_of(mixer, kernel, patch)
    ]
    for row in rows:
        print(*row.values(), sep="\t")
    write(RESULT, rows)


if __name__ == "__main__":
    main()
