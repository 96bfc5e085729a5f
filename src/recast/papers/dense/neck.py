"""From the one map of a one-resolution trunk to the four of a pyramid, which detection and segmentation heads take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import timm
from timm.layers import Format
from torch import Tensor, nn

from recast.errors import RecastError

__all__ = ["Neck", "Stages", "with_body"]


class Stages(nn.Module):
    """The maps of a timm network, `body`, from stride 4 on, finest first; `channels` and `strides` describe them.

    If all have one stride (PatchConvNet, ViT), the maps are those that `Neck` makes of the last. `options` are those of
    the network. Raises RecastError if it has no such maps.
    """

    def __init__(self, name: str, pretrained: bool = False, **options: Any) -> None:
        super().__init__()
        self.body = timm.create_model(name, pretrained=pretrained, features_only=True, **options)
        stages: Any = self.body.feature_info
        self.kept = [index for index, stride in enumerate(stages.reduction()) if stride >= 4]
        if not self.kept:
            raise RecastError(f"{name} has maps of strides {stages.reduction()}, none of 4 or more: take another")
        self.channels, self.strides = (
            [values()[i] for i in self.kept] for values in (stages.channels, stages.reduction)
        )
        self.neck = Neck(self.channels[-1]) if len(set(self.strides)) == 1 else None
        if self.neck is not None:
            self.channels, self.strides = list(self.neck.channels), list(self.neck.strides)

    def adapt_weights(
        self, model: nn.Module, weights: Mapping[str, Tensor], whole: bool, origin: str
    ) -> Mapping[str, Tensor]:
        """Return a classifier's weights under their names in `model`, whose body this is (`with_body`).

        Raises RecastError if the weights must be those of the `whole` network and are the body's alone.
        """
        around = with_body(model, weights)
        if around is not None and whole:
            raise RecastError(f"{origin} has no head of {type(model).__name__}, only its body: set model.new_head")
        return weights if around is None else around

    def maps(self, x: Tensor) -> list[Tensor]:
        """Return the maps (B, C, h, w) of images x."""
        maps = self.body(x)
        if getattr(self.body, "output_fmt", None) == Format.NHWC:
            maps = [x.permute(0, 3, 1, 2) for x in maps]
        maps = [maps[index] for index in self.kept]
        return maps if self.neck is None else self.neck(maps[-1])


def with_body(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return the weights of a network on `Stages`, its body's replaced by a classifier's, `weights`.

    Weights without a place there are dropped. None if `weights` are of the whole network, or it has no `Stages`. timm
    joins the parts of a name by _ if it is asked for a network's stages.
    """
    stages = next((f"{name}.body.".lstrip(".") for name, m in model.named_modules() if isinstance(m, Stages)), None)
    if stages is None or any(name.startswith(stages) for name in weights):
        return None
    theirs = {name.replace(".", "_"): value for name, value in weights.items()}
    result = {}
    for name, own in model.state_dict().items():
        short = name.removeprefix(stages).removeprefix("model.")
        value = theirs.get(short.replace(".", "_")) if name.startswith(stages) else own
        if value is not None:
            result[name] = value
    return result


class Neck(nn.Module):
    """One map x (B, d, h, w) of stride 16 to four maps of d channels and strides 4, 8, 16 and 32.

        p₄  = U₂(GELU(norm(U₁ x)))     (B, d, 4h, 4w)       U: transposed convolution 2×2 of stride 2, with bias
        p₈  = U₃ x                     (B, d, 2h, 2w)
        p₁₆ = x                        (B, d, h, w)
        p₃₂ = max over 2×2 of x        (B, d, ⌊h/2⌋, ⌊w/2⌋)

        trunk = timm.create_model("patchconvnet_s60", features_only=True, out_indices=(-1,))
        maps = Neck(384)(trunk(images)[-1])

    `norm_layer(d)` makes the norm; the papers use `nn.SyncBatchNorm`. `channels` and `strides` describe the maps.

    Touvron et al. 2021 (arXiv:2112.13692) feed dense heads from the last map alone and do not say how. This is the neck
    of XCiT (El-Nouby et al. 2021) and BEiT (Bao et al. 2021); with it, parameters and multiply-accumulates of the four
    UperNets are those published.
    """

    strides = (4, 8, 16, 32)

    def __init__(self, dim: int, norm_layer: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.channels = (dim,) * len(self.strides)
        self.up4 = nn.Sequential(_double(dim), norm_layer(dim), nn.GELU(), _double(dim))
        self.up8 = _double(dim)
        self.down32 = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the maps of strides 4, 8, 16 and 32; the third is `x` itself."""
        return [self.up4(x), self.up8(x), x, self.down32(x)]


def _double(dim: int) -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(dim, dim, 2, stride=2)
