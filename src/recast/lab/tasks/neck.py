"""From the one map of a one-resolution trunk to the four of a pyramid: what detection and segmentation heads take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import timm
from timm.layers import Format
from torch import Tensor, nn

from recast.errors import RecastError

__all__ = ["Neck", "Stages", "with_body"]


class Stages(nn.Module):
    """A network of timm, `body`, seen from stride 4 on: `channels` and `strides` describe its maps, finest first. Where
    all of them have one stride (PatchConvNet, ViT), the maps are those that `Neck` makes of the last.

    `options` are those of the network. Raises RecastError for one without such maps.
    """

    def __init__(self, name: str, pretrained: bool = False, **options: Any) -> None:
        super().__init__()
        self.body = timm.create_model(name, pretrained=pretrained, features_only=True, **options)
        stages: Any = self.body.feature_info
        self.kept = [index for index, stride in enumerate(stages.reduction()) if stride >= 4]
        if not self.kept:
            raise RecastError(f"{name} has maps of strides {stages.reduction()}, none of 4 or more: take another")
        self.channels, self.strides = ([told()[i] for i in self.kept] for told in (stages.channels, stages.reduction))
        self.neck = Neck(self.channels[-1]) if len(set(self.strides)) == 1 else None
        if self.neck is not None:
            self.channels, self.strides = list(self.neck.channels), list(self.neck.strides)

    def adapt_weights(
        self, model: nn.Module, weights: Mapping[str, Tensor], whole: bool, origin: str
    ) -> Mapping[str, Tensor]:
        """Return a classifier's weights under the names that they have in `model`, whose body this is (`with_body`).

        Raises RecastError where the weights must be those of the whole network and are the body's alone.
        """
        around = with_body(model, weights)
        if around is not None and whole:
            raise RecastError(f"{origin} has no head of {type(model).__name__}, only its body: set model.new_head")
        return weights if around is None else around

    def maps(self, x: Tensor) -> list[Tensor]:
        """Of images x, each (B, C, h, w)."""
        maps = self.body(x)
        if getattr(self.body, "output_fmt", None) == Format.NHWC:
            maps = [x.permute(0, 3, 1, 2) for x in maps]
        maps = [maps[index] for index in self.kept]
        return maps if self.neck is None else self.neck(maps[-1])


def with_body(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The weights of a network on `Stages` with a classifier's, `weights`, for its body, under timm's names; what has
    no place there is left out. None where `weights` are of the whole, or the network is on none.

    timm joins the parts of a name by _ where it is asked for a network's stages.
    """
    stages = next((f"{name}.body.".lstrip(".") for name, m in model.named_modules() if isinstance(m, Stages)), None)
    if stages is None or any(name.startswith(stages) for name in weights):
        return None
    theirs = {name.replace(".", "_"): value for name, value in weights.items()}
    found = {}
    for name, own in model.state_dict().items():
        short = name.removeprefix(stages).removeprefix("model.")
        value = theirs.get(short.replace(".", "_")) if name.startswith(stages) else own
        if value is not None:
            found[name] = value
    return found


class Neck(nn.Module):
    """One map x (B, d, h, w) of stride 16 to four maps of d channels and strides 4, 8, 16 and 32.

        p₄  = U₂(GELU(norm(U₁ x)))     (B, d, 4h, 4w)       U: transposed convolution 2×2 of stride 2, with bias
        p₈  = U₃ x                     (B, d, 2h, 2w)
        p₁₆ = x                        (B, d, h, w)
        p₃₂ = max over 2×2 of x        (B, d, ⌊h/2⌋, ⌊w/2⌋)

    A trunk without stages has no finer or coarser map to offer, and an FPN or a UperNet asks for one of each stride:
    all four are made from the last map, the only one with everything the trunk computed. Works on whatever makes a map
    of stride 16:

        trunk = timm.create_model("patchconvnet_s60", features_only=True, out_indices=(-1,))
        maps = Neck(384)(trunk(images)[-1])

    Any h and w of 2 or more. Where one is odd, the last row or column is in no window of p₃₂; detection code pads
    images to multiples of 32, and then none is. `norm_layer(d)` makes the norm, for several processes
    `nn.SyncBatchNorm` (the papers' choice). `channels` and `strides` describe the maps, in their order.

    Raises RecastError for dim below 1, for anything but a map of d channels, and for one too small for a 2×2 window.

    Source: Touvron et al. 2021 (arXiv:2112.13692) feed dense heads from the last map alone and do not say how. This is
    the neck of XCiT (El-Nouby et al. 2021) and BEiT (Bao et al. 2021) for ViTs of patch 16; with it, the parameters
    and multiply-accumulates of the four UperNets come out as published (tests/models/test_neck.py).
    """

    strides = (4, 8, 16, 32)

    def __init__(self, dim: int, norm_layer: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        if dim < 1:
            raise RecastError(f"a neck needs the channels of its map, dim of 1 or more, got {dim}")
        self.dim = dim
        self.channels = (dim,) * len(self.strides)
        self.up4 = nn.Sequential(_double(dim), norm_layer(dim), nn.GELU(), _double(dim))
        self.up8 = _double(dim)
        self.down32 = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> list[Tensor]:
        """The maps of strides 4, 8, 16 and 32; the third is `x` itself."""
        if x.dim() != 4 or x.shape[1] != self.dim:
            raise RecastError(
                f"the neck expects a map of {self.dim} channels (batch, {self.dim}, height, width), got "
                f"{tuple(x.shape)}: pass the trunk's last map, and Neck(dim) its number of channels"
            )
        if min(x.shape[-2:]) < 2:
            raise RecastError(
                f"stride 32 needs a map of 2×2 or more, got {x.shape[-2]}×{x.shape[-1]}: pass images of 32 pixels a "
                "side or more"
            )
        return [self.up4(x), self.up8(x), x, self.down32(x)]


def _double(dim: int) -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(dim, dim, 2, stride=2)
