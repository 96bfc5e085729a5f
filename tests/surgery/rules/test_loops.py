"""A second reference for every kind of convolution: NumPy loops that share no code with the package."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recast.layers.config import PAPERS_LAYER, RecastConfig
from recast.layers.functional import dense, merged, plain, reference, sdpa, split
from recast.layers.gpsa import GPSA
from recast.surgery.rules import convert

FUNCTIONS = {f.__name__: f for f in (reference, dense, split, merged, plain, sdpa)}
SEEDS = range(500, 516)
Array = NDArray[np.float64]


def softmax(logits: Array) -> Array:
    exponentials: Array = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()


class Axis:
    """One axis of a layer: its tokens, the real pixels among them, and where every output looks."""

    def __init__(self, module: Any, axis: int, size: int) -> None:
        taps, dilation, stride = module.kernel_size[axis], module.dilation[axis], module.stride[axis]
        reach = dilation * (taps - 1)
        if isinstance(module, torch.nn.ConvTranspose2d):
            # zeros between the pixels and around them; PyTorch's padding crops, its output padding adds to the end
            before = reach - module.padding[axis]
            self.size = stride * (size - 1) + 1 + before + reach - module.padding[axis] + module.output_padding[axis]
            self.pixels, step = [before + stride * i for i in range(size)], 1
        elif type(module) is torch.nn.Conv2d:
            words = {"valid": (0, 0), "same": (reach // 2, reach - reach // 2)}
            before, after = words.get(module.padding) or (module.padding[axis],) * 2
            self.size, self.pixels, step = size + before + after, [before + i for i in range(size)], stride
        elif getattr(module, "same_pad", True):
            # as few zeros as give one output for every started stride, the odd one last
            outputs = math.ceil(size / stride)
            added = next(n for n in itertools.count() if (size + n - reach - 1) // stride + 1 >= outputs)
            self.size, step = size + added, stride
            self.pixels = [added // 2 + i for i in range(size)]
        else:
            before, step = module.padding[axis], stride
            self.size, self.pixels = size + 2 * before, [before + i for i in range(size)]
        self.starts = [start for start in range(0, self.size, step) if start + reach < self.size]
        self.taps = [dilation * a for a in range(taps)]
        self.anchor, self.reach = reach // 2, reach

    def nearest_pixel(self, start: int) -> int:
        """Index of the pixel nearest the middle of the window, the later one of two equally near."""
        middle = start + self.reach / 2
        return min(range(len(self.pixels)), key=lambda i: (abs(self.pixels[i] - middle), -i))


def kernels(kernel: Array, groups: int) -> Array:
    """(O, C/g, …) → (taps, C, O): what each tap multiplies the channels with, zero outside a channel's own group."""
    outputs, inputs = len(kernel) // groups, kernel.shape[1]
    w_out = np.zeros((kernel[0, 0].size, inputs * groups, outputs * groups))
    for g in range(groups):
        block = kernel[g * outputs : (g + 1) * outputs].reshape(outputs, inputs, -1)
        w_out[:, g * inputs : (g + 1) * inputs, g * outputs : (g + 1) * outputs] = block.transpose(2, 1, 0)
    return w_out


def attention_loops(x: Array, module: Any, kernel: Array, layer: GPSA, attend_padding: bool) -> Array:
    """One image (C, H, W) → (O, I, J): y = b + Σ_h A_h X W_val W_out^h, pixel by pixel and head by head."""
    p = {name: value.detach().numpy() for name, value in layer.named_parameters()}
    rows, columns = Axis(module, 0, x.shape[1]), Axis(module, 1, x.shape[2])
    grid = np.zeros((len(x), rows.size, columns.size))
    real = np.zeros((rows.size, columns.size), dtype=bool)
    if getattr(module, "padding_mode", "zeros") == "zeros":
        grid[:, np.array(rows.pixels)[:, None], columns.pixels] = x
    else:
        ring = [(axis.pixels[0], axis.size - 1 - axis.pixels[-1]) for axis in (rows, columns)]
        mode = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}[module.padding_mode]
        grid = np.stack([np.pad(plane, ring, mode=mode) for plane in x])
    real[np.array(rows.pixels)[:, None], columns.pixels] = True
    tokens, attended = grid.reshape(len(x), -1).T, real.ravel() | attend_padding
    keys_at = np.array(list(itertools.product(range(rows.size), range(columns.size))), dtype=float)
    w_out, per_group = kernels(kernel, module.groups), module.in_channels // module.groups
    w_val = np.eye(len(x))
    if "value" in p:
        for first in range(0, len(x), per_group):
            w_val[first : first + per_group, first : first + per_group] = p["value"][first : first + per_group].T
    values = tokens @ w_val
    alpha, width = np.log1p(np.exp(5 * p["raw_alpha"])) / 5, layer.head_dim
    y = np.zeros((module.out_channels, len(rows.starts), len(columns.starts)))
    for (i, top), (j, left) in itertools.product(enumerate(rows.starts), enumerate(columns.starts)):
        anchor = np.array([top + rows.anchor, left + columns.anchor])
        if isinstance(module, torch.nn.ConvTranspose2d):
            query_token = x[:, rows.nearest_pixel(top), columns.nearest_pixel(left)]
        else:
            query_token = grid[:, anchor[0], anchor[1]]
        for h, (down, right) in enumerate(itertools.product(rows.taps, columns.taps)):
            shift = np.zeros((rows.size, columns.size))
            shift[top + down, left + right] = 1
            gaussian = softmax(-alpha[h] * ((keys_at - anchor - p["center"][h]) ** 2).sum(1))
            head = slice(h * width, (h + 1) * width)
            logits = (tokens @ p["key"][head].T) @ (p["query"][head] @ query_token) / math.sqrt(width)
            content = softmax(np.where(attended, logits, -np.inf))
            if layer.config.gate == "linear":
                gamma, s = p["gamma"][h], p["spread"][h]
                attention = (1 - gamma) * ((1 - s) * shift.ravel() + s * gaussian) + gamma * content
            else:
                sigma = 1 / (1 + math.exp(-p["lam"][h]))
                attention = sigma * gaussian + (1 - sigma) * content
            y[:, i, j] += attention @ values @ w_out[h]
    return y if module.bias is None else y + module.bias.detach().numpy()[:, None, None]


@pytest.mark.parametrize("kind", ["Conv2d", "Conv2dSame", "ConvTranspose2d", "ScaledStdConv2dSame"])
@pytest.mark.parametrize("gate", ["linear", "sigmoid"])
@pytest.mark.parametrize("attend_padding", [False, True])
def test_against_loops_in_numpy(
    kind: str, gate: Any, attend_padding: bool, case_of: Any, kernel_of: Any, open_gates: Any
) -> None:
    config = RecastConfig(gate=gate, attend_padding=attend_padding, **PAPERS_LAYER)
    for seed in SEEDS:
        module, x, text = case_of(kind, seed)
        layer = open_gates(convert(module, config), seed)
        kernel = kernel_of(module).detach().numpy()
        expected = np.stack([attention_loops(image, module, kernel, layer, attend_padding) for image in x.numpy()])
        for name, function in FUNCTIONS.items():
            y = function(x, layer.weights()).detach().numpy()
            assert np.abs(y - expected).max() <= 1e-10 * np.abs(expected).max(), f"{name}, {text}"
