"""A geometry and a kernel as torch's own module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from recast.layers.geometry import Geometry, flip_transpose

PADDING_LAYERS: dict[str, type[nn.Module]] = {
    "zeros": nn.ZeroPad2d,
    "reflect": nn.ReflectionPad2d,
    "replicate": nn.ReplicationPad2d,
    "circular": nn.CircularPad2d,
}


def convolution(
    geometry: Geometry, kernel: Tensor, bias: Tensor | None, groups: int, trained: bool = True
) -> nn.Module:
    """The module that computes `geometry.convolve(x, kernel, bias, groups)`.

    `kernel` (O, C/g, rows, columns) becomes its parameter and is not copied, `bias` (O,) is. Where `nn.Conv2d` has no
    word for the padding, a padding layer goes before it.
    """
    g, (top, bottom, left, right) = geometry, geometry.padding
    size: dict[str, Any] = {"in_channels": kernel.shape[1] * groups, "out_channels": kernel.shape[0]}
    size |= {"kernel_size": g.kernel, "dilation": g.dilation, "groups": groups, "bias": bias is not None}
    size |= {"device": kernel.device, "dtype": kernel.dtype}
    explicit = not g.is_transposed and not g.same and (top, left) != (bottom, right)
    conv: nn.Module
    if g.is_transposed:
        cropped = (g.reach[0] - top, g.reach[1] - left)
        conv = nn.ConvTranspose2d(
            **size, stride=g.upsample, padding=cropped, output_padding=(bottom - top, right - left)
        )
        kernel = flip_transpose(kernel, groups)
    elif g.same:
        from timm.layers import Conv2dSame

        conv = Conv2dSame(**size, stride=g.stride)
    else:
        mode = "zeros" if explicit else g.padding_mode
        conv = nn.Conv2d(**size, stride=g.stride, padding=0 if explicit else (top, left), padding_mode=mode)
    conv.weight = nn.Parameter(kernel, trained)
    if bias is not None:
        conv.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    if not explicit:
        return conv
    return nn.Sequential(PADDING_LAYERS[g.padding_mode]((left, right, top, bottom)), conv)
