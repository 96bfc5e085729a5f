"""Settings that only DeiT, DeiT III, CaiT, ResMLP and PatchConvNet need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from recast.config import NotNegative, Positive, Rare
from recast.errors import RecastError
from recast.lab.config.recipe import PaperConfig
from recast.lab.evaluation.suites import METRICS, SUITES, Metric, Suite

if TYPE_CHECKING:
    from torch import nn

METRICS["cosine"] = Metric("Cosine of the tokens", "", meaning="of class and distillation token, mean over the images")
METRICS["branch"] = Metric("Branch over main path", "", meaning="‖g(x)‖ / ‖x‖ over all tokens, mean over the images")
MODULE = "recast.papers.deit.suites"
SUITES |= {
    "branches": Suite(
        "Branches of a transformer", "norm of every block's attention and MLP branch relative to the main path",
        "accuracy", ("branch",), "block {}", module=MODULE,
    ),
    "crop": Suite(
        "Test crop", "accuracy with centre crops of 0.875, 0.9, 0.95 and 1 of the short side", "accuracy",
        setting="crop {}", module=MODULE,
    ),
    "tokens": Suite(
        "Heads of a distilled DeiT", "accuracy of class head, distillation head and their mean; cosine of the tokens",
        "accuracy", ("top1", "cosine"), "after block {}", module=MODULE,
    ),
}  # fmt: skip


class DeitConfig(PaperConfig):
    """DeiT, DeiT III, CaiT, ResMLP"""

    section: ClassVar[str] = "deit"
    drop_path_mode: Annotated[Literal["linear", "uniform"], Rare()] = "linear"
    """Stochastic depth of the blocks. linear: from 0 at the first to drop_path at the last. uniform: equal in all."""
    layer_scale: Annotated[NotNegative | None, Rare()] = None
    """Initial value of the network's LayerScale. None: as the network was built."""
    init_std: Annotated[Positive | None, Rare()] = None
    """Standard deviation of the initial weights of linear layers and tokens (DeiT: 0.02); other weights as in torch.
    None: as the network was built."""

    def check_trained(self) -> None:
        """Raise RecastError for settings that would overwrite trained weights."""
        for name, target in (("layer_scale", "LayerScale"), ("init_std", "weights")):
            if getattr(self, name) is not None:
                option = f"--{name.replace('_', '-')} null"
                raise RecastError(
                    f"papers.deit.{name} overwrites the trained {target}: use {option} with trained weights"
                )

    def draw_(self, model: nn.Module) -> None:
        """Initialize the weights of linear layers and tokens."""
        from recast.papers.first_weights import draw_

        if self.init_std is not None:
            draw_(model, self.init_std)

    def prepare_(self, model: nn.Module) -> None:
        """Set LayerScale, y = x + γ·F(x) with γ per channel (Touvron et al. 2021, CaiT), and in class attention,
        as in the published code. Raises RecastError for a network without LayerScale."""
        from torch.nn import init

        from recast.surgery.scales import layer_scales

        if self.layer_scale is None:
            return
        if not (scales := layer_scales(model)):
            raise RecastError(f"{type(model).__name__} has no LayerScale: drop layer_scale")
        for scale in scales.values():
            init.constant_(scale, self.layer_scale)

    def drop_path_(self, model: nn.Module, rate: float) -> None:
        """Give all blocks the same stochastic depth."""
        from recast.lab.training.regularization import set_drop_path_

        if self.drop_path_mode == "uniform":
            set_drop_path_(model, rate, "uniform")
