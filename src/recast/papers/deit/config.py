"""Settings that only DeiT, DeiT III, CaiT, ResMLP and PatchConvNet need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from recast.config import NotNegative, Positive, Rare
from recast.errors import RecastError
from recast.lab.config.recipe import PaperConfig
from recast.lab.suites import METRICS, SUITES, Metric, Suite

if TYPE_CHECKING:
    from torch import nn

METRICS["cosine"] = Metric("Cosine of the tokens", "", meaning="of class and distillation token, mean over the images")
METRICS["branch"] = Metric("Branch over main path", "", meaning="‖g(x)‖ / ‖x‖ over all tokens, mean over the images")
SUITES |= {
    "branches": Suite(
        "Branches of a transformer", "size of what attention and MLP of every block add, over the main path's",
        "accuracy", ("branch",), "block {}",
    ),
    "crop": Suite(
        "Test crop", "accuracy with 0.875, 0.9, 0.95 and all of the short side in the centre crop", "accuracy",
        setting="crop {}",
    ),
    "tokens": Suite(
        "Heads of a distilled DeiT", "accuracy of class head, distillation head and their mean; cosine of their tokens",
        "accuracy", ("top1", "cosine"), "after block {}",
    ),
}  # fmt: skip


class DeitConfig(PaperConfig):
    """DeiT, DeiT III, CaiT, ResMLP"""

    section: ClassVar[str] = "deit"
    drop_path_mode: Annotated[Literal["linear", "uniform"], Rare()] = "linear"
    """linear: from 0 at the first block to drop_path at the last. uniform: the same in every block."""
    layer_scale: Annotated[NotNegative | None, Rare()] = None
    """Value that the network's LayerScale starts with. None: as the network was built."""
    init_std: Annotated[Positive | None, Rare()] = None
    """Draw the weights of linear layers and tokens anew with this standard deviation, as DeiT does (0.02), all else as
    torch does. None: as the network was built."""

    def check_trained(self) -> None:
        """Raise RecastError for settings that would wipe trained weights."""
        for name, wiped in (("layer_scale", "LayerScale"), ("init_std", "weights")):
            if getattr(self, name) is not None:
                raise RecastError(f"papers.deit.{name} would wipe the trained {wiped}: it is for random weights")

    def draw_(self, model: nn.Module) -> None:
        """Draw the weights of linear layers and tokens anew."""
        from recast.papers.first_weights import draw_

        if self.init_std is not None:
            draw_(model, self.init_std)

    def prepare_(self, model: nn.Module) -> None:
        """Set LayerScale, y = x + γ·F(x) with γ one number a channel (Touvron et al. 2021, CaiT), in class-attention
        blocks too, as in the published code. Raises RecastError for a network without it."""
        from torch.nn import init

        from recast.lab.scales import layer_scales

        if self.layer_scale is None:
            return
        if not (scales := layer_scales(model)):
            raise RecastError(f"{type(model).__name__} has no LayerScale: leave layer_scale out")
        for scale in scales.values():
            init.constant_(scale, self.layer_scale)

    def drop_path_(self, model: nn.Module, rate: float) -> None:
        """Give all blocks the same stochastic depth."""
        from recast.lab.training.regularization import set_drop_path_

        if self.drop_path_mode == "uniform":
            set_drop_path_(model, rate, "uniform")
