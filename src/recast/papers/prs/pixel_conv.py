"""A convolution of pixels inside a transformer, whose tokens are patches of P×P pixels.

A token's P²·C channels are a patch of C channels, in the order of `pixel_unshuffle`: channel (c·P + p)·P + q is channel
c of the patch's pixel (p, q). A K×K convolution of these pixels reaches m = ⌈(K−1)/2P⌉ tokens far, so it is a
convolution of tokens with (2m+1)² taps, which C-MHSA turns into (2m+1)² heads (Li et al. 2021, Can Vision Transformers
Perform Convolution?, arXiv:2111.01353; Lee et al. 2022, PRS, lists nine of them for K = 5 as for K = 3).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recast.errors import RecastError
from recast.layers.cmhsa import RecastLayer
from recast.layers.config import RecastConfig
from recast.surgery.rules import convert, effective_weight, recasts

__all__ = ["PixelConv2d"]


class PixelConv2d(nn.Module):
    """Tokens (B, P²·C, H, W) to pixels (B, C, P·H, P·W), a K×K convolution with zero padding ⌊K/2⌋, and back to tokens
    (B, P²·C', H, W).

    Parameters: `weight` (C', C, K, K), and `bias` (P²·C',), one for every channel of a token. The attributes of a
    convolution (`in_channels`, `kernel_size` …) are those of the convolution of tokens that this one is.
    Raises RecastError for an even kernel and for channels that P² does not divide.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int, patch_size: int, *, bias: bool = True) -> None:
        super().__init__()
        if kernel < 1 or kernel % 2 == 0:
            raise RecastError(f"a convolution of pixels needs an odd kernel, got {kernel}")
        pixels = patch_size**2
        if in_channels % pixels or out_channels % pixels:
            raise RecastError(
                f"patches of {patch_size}×{patch_size} pixels need a multiple of {pixels} channels, got {in_channels} "
                f"and {out_channels}"
            )
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, 1
        self.kernel, self.patch_size = kernel, patch_size
        self.weight = nn.Parameter(torch.empty(out_channels // pixels, in_channels // pixels, kernel, kernel))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as `nn.Conv2d` does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.weight[0].numel())
            nn.init.uniform_(self.bias, -bound, bound)

    @property
    def reach(self) -> int:
        """Return m = ⌈(K−1)/2P⌉, the number of tokens that the kernel reaches beyond its own."""
        return -(-(self.kernel - 1) // (2 * self.patch_size))

    @property
    def kernel_size(self) -> tuple[int, int]:
        """Return rows and columns of the convolution of tokens, 2m+1 each."""
        return 2 * self.reach + 1, 2 * self.reach + 1

    def forward(self, x: Tensor) -> Tensor:
        pixels = F.conv2d(F.pixel_shuffle(x, self.patch_size), self.weight, padding=self.kernel // 2)
        tokens = F.pixel_unshuffle(pixels, self.patch_size)
        return tokens if self.bias is None else tokens + self.bias[:, None, None]

    def token_kernel(self, weight: Tensor) -> Tensor:
        """Return T, the kernel of tokens (P²C', P²C, 2m+1, 2m+1) for a kernel of pixels `weight` (C', C, K, K).

            T[(c', p', q'), (c, p, q), u+m, v+m] = weight[c', c, u·P + p − p' + r, v·P + q − q' + r] within the kernel,
            else 0; r = ⌊K/2⌋.

        Entries are copied, not computed: this holds for an optimiser's moments of `weight` as well.
        """
        size, reach, kernel = self.patch_size, self.reach, self.kernel
        u = torch.arange(-reach, reach + 1, device=weight.device)
        p = torch.arange(size, device=weight.device)
        at = u * size + p[None, :, None] - p[:, None, None] + kernel // 2  # (p', p, u)
        at = torch.where((at >= 0) & (at < kernel), at, kernel)  # one beyond: the zeros
        entries = F.pad(weight, (0, 1, 0, 1))[:, :, at[..., None, None, None], at]  # (C', C, p', p, u, q', q, v)
        kernels = entries.permute(0, 2, 5, 1, 3, 6, 4, 7)
        return kernels.reshape(self.out_channels, self.in_channels, *self.kernel_size)

    def extra_repr(self) -> str:
        tokens = "×".join(map(str, self.kernel_size))
        return (
            f"{self.in_channels}, {self.out_channels}, {self.kernel}×{self.kernel} pixels of patches of "
            f"{self.patch_size}×{self.patch_size} ({tokens} tokens), bias={self.bias is not None}"
        )


@recasts(PixelConv2d)
def _pixel_conv2d(conv: PixelConv2d, config: RecastConfig) -> RecastLayer:
    """Recast with T as the kernel: W_out^(u,v) = T_uv, W_val = I."""
    kernel = conv.token_kernel(effective_weight(conv))
    like: dict[str, Any] = {"bias": conv.bias is not None, "device": kernel.device, "dtype": kernel.dtype}
    plain = nn.Conv2d(conv.in_channels, conv.out_channels, conv.kernel_size, padding=conv.reach, **like)
    plain.weight = nn.Parameter(kernel, any(p.requires_grad for n, p in conv.named_parameters() if n != "bias"))
    if conv.bias is not None:
        plain.bias = conv.bias
    return convert(plain.train(conv.training), config)
